"""The addresses of a stack's model servers, and the request for tokens.

Trainer, environment and page name the servers in the same way: by URLs, with commas between them. The URL of a server
is fixed. `dns+http://model:9001` represents one server for each address that the name `model` has at a time. In Compose
these are the containers of `--scale model=2`; in Kubernetes, the pods of a headless service. The programs look the name
up again every `LOOK_UP_EVERY` seconds, so they find a server that joins late.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from gristmill.errors import ConfigError

DNS = "dns+"
LOOK_UP_EVERY = 2.0
"""Seconds between two look-ups of a name."""
GENERATE = "/inference/v1/generate"
"""vLLM's route for token ids: token ids in, token ids and log-probabilities out."""

LookUp = Callable[[str, int], Iterable[str]]
"""Returns the IP addresses of a host name and a port. Raises OSError if the name has none."""


def generation(model: str, token_ids: Sequence[int], sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the body of POST `GENERATE`. Environments sample with it, and the trainer's receipts ask with it.

    `model`: the served name, which is the `id` of a model in GET /v1/models. A server of LoRA adapters chooses between
    model and adapter by this name, so a receipt without it would not show what environments sample from.
    """
    return {"model": model, "token_ids": list(token_ids), "sampling_params": dict(sampling)}


def split_urls(text: str) -> list[str]:
    """Returns the URLs of a list with commas between them, without empty parts. Raises ConfigError for a URL that is
    not valid."""
    return [check_url(url) for part in text.split(",") if (url := part.strip())]


def check_url(url: str) -> str:
    """Returns `url` without a slash at its end. Raises ConfigError for another scheme than http, https or dns+http, and
    for a dns+http URL without a host and a port."""
    if not url.startswith(("http://", "https://", f"{DNS}http://")):
        raise ConfigError(
            "url_scheme",
            f"the URL of a model server starts with http://, https:// or {DNS}http://, not '{url}'",
            url=url,
        )
    if url.startswith(DNS):
        _host_and_port(url)
    return url.rstrip("/")


class ServerAddresses:
    """The servers that one URL represents."""

    def __init__(self, url: str, look_up: LookUp | None = None) -> None:
        """`look_up`: asks the name server; the default is the operating system's. Raises ConfigError."""
        self.url = check_url(url)
        self.by_name = self.url.startswith(DNS)
        """Whether the servers can change."""
        self._look_up = look_up or _ask_the_system
        self._found: list[str] = [] if self.by_name else [self.url]

    def find(self) -> list[str]:
        """Returns the servers' URLs, sorted. A look-up blocks until the name server answers.

        If the look-up fails, returns the URLs of the last successful look-up: a name server that is away has no effect
        on servers that run. The list is empty until the first successful look-up.
        """
        if self.by_name:
            host, port, path = _host_and_port(self.url)
            try:
                addresses = {ipaddress.ip_address(address) for address in self._look_up(host, port)}
            except OSError:
                return list(self._found)
            # A host with addresses of both versions is one server.
            version = min((address.version for address in addresses), default=4)
            numbers = sorted(int(address) for address in addresses if address.version == version)
            hosts = [
                str(ipaddress.IPv4Address(n)) if version == 4 else f"[{ipaddress.IPv6Address(n)}]" for n in numbers
            ]
            self._found = [f"http://{address}:{port}{path}" for address in hosts] or self._found
        return list(self._found)


def find_all(names: Iterable[ServerAddresses]) -> list[str]:
    """Returns the URLs of all servers, each once, in the order of `names`. Blocks as `ServerAddresses.find` does."""
    return list(dict.fromkeys(url for name in names for url in name.find()))


def _host_and_port(url: str) -> tuple[str, int, str]:
    """Returns host, port and path of a dns+http URL."""
    parts = urlsplit(url.removeprefix(DNS))
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.hostname is None or port is None:
        raise ConfigError("url_without_port", f"'{url}' needs a host and a port: {DNS}http://model:9001", url=url)
    return parts.hostname, port, parts.path.rstrip("/")


def _ask_the_system(host: str, port: int) -> list[str]:
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]).partition("%")[0] for *_, address in addresses]
