"""Settings of access, read once from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from gristmill import ConfigError, hosts
from gristmill.hosts import AllowedHosts
from gristmill_api.access.tokens import Tokens

NAMES: Final = ("API_AUTH", "API_TOKENS_DIR", "API_CORS_ORIGINS", "API_IN_COMPOSE", hosts.VARIABLE)


@dataclass(frozen=True)
class AccessSettings:
    tokens: Tokens | None = None
    """The tokens that requests must carry. None: a client that reaches the port may do everything (API_AUTH=none)."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose web pages may use the API."""
    hosts: AllowedHosts = field(default_factory=AllowedHosts)
    """Hosts that requests may name."""
    in_compose: bool = False
    """The API listens inside a container's network. compose.yaml decides which ports are published."""

    @property
    def auth(self) -> str:
        return "none" if self.tokens is None else "token"

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> AccessSettings:
        """From `os.environ`. An empty variable counts as unset. Raises ConfigError."""
        auth = environ.get("API_AUTH") or "none"
        if auth not in ("none", "token"):
            raise ConfigError(
                "variable_invalid", f"API_AUTH={auth!r} is not known; it is none or token.", variable="API_AUTH"
            )
        folder = environ.get("API_TOKENS_DIR")
        if auth == "token" and not folder:
            raise ConfigError(
                "variable_unset",
                "API_AUTH=token, but API_TOKENS_DIR is not set; it names the folder with the token files env, trainer "
                "and admin (`make secure` makes one).",
                variable="API_TOKENS_DIR",
            )
        in_compose = environ.get("API_IN_COMPOSE") or "0"
        if in_compose not in ("0", "1"):
            raise ConfigError(
                "variable_invalid",
                f"API_IN_COMPOSE={in_compose!r} is not known; compose.yaml sets it to 1.",
                variable="API_IN_COMPOSE",
            )
        return cls(
            tokens=Tokens.read(Path(folder)) if auth == "token" and folder else None,
            cors_origins=parse_origins(environ.get("API_CORS_ORIGINS", "")),
            hosts=AllowedHosts.read(environ),
            in_compose=in_compose == "1",
        )


def parse_origins(text: str) -> tuple[str, ...]:
    """Returns "https://a.example, http://localhost:3000" as a tuple. Raises ConfigError unless all are full origins."""
    origins = tuple(part.strip() for part in text.split(",") if part.strip())
    for origin in origins:
        parts = urlsplit(origin)
        if parts.scheme not in ("http", "https") or not parts.hostname or origin != f"{parts.scheme}://{parts.netloc}":
            raise ConfigError(
                "variable_invalid",
                f"API_CORS_ORIGINS: {origin!r} is not an origin; write full origins, https://host or http://host:port, "
                "with commas between them. '*' is not accepted: it would let every web page act.",
                variable="API_CORS_ORIGINS",
            )
    return origins
