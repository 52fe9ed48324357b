"""The host names that a server answers for: the check of `Host` against DNS rebinding.

An attacker points a DNS name at 127.0.0.1. The browser then treats the attacker's web page as a page of the server, so
the same-origin rule lets the page read and change everything. The browser still sends the attacker's name in `Host`.
A server that only answers for known names is therefore safe. An IP address is always allowed, because a browser that
sends an IP address used no DNS name.

This module uses raw ASGI headers and no server library, because the trajectory API and the model server's gate share
it.
"""

from __future__ import annotations

import functools
import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from gristmill.errors import ConfigError

VARIABLE: Final = "API_ALLOWED_HOSTS"
CODE: Final = "host_not_allowed"
STATUS: Final = 421
"""Misdirected Request: the request was sent to a server that does not answer for its host."""
_ALWAYS: Final = ("localhost", "*.localhost", "api", "model", "env", "trainer")
"""Loopback names, and the services of compose.yaml that listen to HTTP."""
_NAME: Final = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_HEADER: Final = re.compile(r"(?P<name>\[[^\[\]]+\]|[^\[\]:]+)(:\d*)?")


@dataclass(frozen=True)
class AllowedHosts:
    """The allowed hosts: loopback names, IP addresses, services' names in Compose, this machine's name, and `more`."""

    more: frozenset[str] = frozenset()
    """More host names, in lower case. `*.example.com` allows every name that ends in `.example.com`."""
    every: bool = False
    """Whether every host is allowed, without protection against DNS rebinding."""
    machine: str = field(default_factory=lambda: socket.gethostname().lower())

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> AllowedHosts:
        """Reads API_ALLOWED_HOSTS, which holds names with commas between them. `*` allows every host.

        Raises ConfigError for an entry that is not a host name, such as a URL or a name with a port.
        """
        names = {name.strip().lower() for name in environ.get(VARIABLE, "").split(",")} - {""}
        for name in sorted(names - {"*"}):
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    "host_name",
                    f"{VARIABLE}: {name!r} is not a host name; write names without scheme and port, with commas "
                    "between them: gpu-box.lan,*.example.com. IP addresses are always allowed.",
                    variable=VARIABLE,
                    name=name,
                )
        return cls(frozenset(names - {"*"}), every="*" in names)

    def refused(self, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        """Returns the `Host` of a request if it is not allowed, else None.

        `headers`: the headers of an ASGI scope, with names in lower case.

        A request without `Host` is allowed: no browser sends one.
        """
        if self.every:
            return None
        for name, value in headers:
            if name == b"host" and not _allows(self, value):
                return value.decode("latin-1")
        return None

    def warning(self) -> str | None:
        """Returns the warning that a server logs at start if it allows every host, else None."""
        if not self.every:
            return None
        return (
            f"EVERY HOST IS ALLOWED ({VARIABLE} holds '*'): a web page that you visit can read and change everything "
            "on this port by DNS rebinding. Name the hosts that you use instead (docs/security.md)."
        )


def message(host: str) -> str:
    """Returns the reason why a request with this `Host` is refused, without the remedy."""
    return f"the request is for the host {host!r}, which this server does not answer for (against DNS rebinding)."


REMEDY: Final = f"Use localhost or an IP address, or add the name to {VARIABLE} (docs/security.md)."


@functools.lru_cache(maxsize=256)  # Most requests name the same host.
def _allows(hosts: AllowedHosts, header: bytes) -> bool:
    match = _HEADER.fullmatch(header.decode("latin-1"))
    if match is None:
        return False
    name = match["name"].lower().removesuffix(".")
    if _is_address(name):
        return True
    allowed = {*_ALWAYS, *hosts.more, hosts.machine}
    parents = name.split(".")[1:]
    return name in allowed or any(f"*.{'.'.join(parents[at:])}" in allowed for at in range(len(parents)))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
