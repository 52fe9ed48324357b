"""The three roles and their tokens, and the other settings of access, read once from the environment."""

from __future__ import annotations

import base64
import binascii
import hmac
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from gristmill import ConfigError
from gristmill.internal import hosts
from gristmill.internal.hosts import AllowedHosts

NAMES: Final = ("API_AUTH", "API_TOKENS_DIR", "API_CORS_ORIGINS", "API_IN_COMPOSE", hosts.VARIABLE)
SHORTEST: Final = 32
"""Characters. `make secure` writes 43: 256 random bits."""
_REMEDY: Final = "`make secure` writes one for every role"


class Role(StrEnum):
    """The role of a token. permissions.py lists the routes of each role."""

    ENV = "env"
    """An environment: opens runs, asks for permits, submits groups."""
    TRAINER = "trainer"
    """A trainer: takes runs, leases and acks groups, publishes versions, ends runs."""
    ADMIN = "admin"
    """An operator: every route. Routes that delete data are for this role only."""


class Tokens:
    """One token per role. Tokens appear neither in repr, nor in errors, nor in logs."""

    def __init__(self, by_role: Mapping[Role, str]) -> None:
        self._by_role = {role: token.encode() for role, token in by_role.items()}

    @classmethod
    def read(cls, folder: Path) -> Tokens:
        """From the files env, trainer and admin in `folder`.

        Raises ConfigError for a file that is missing, unreadable, empty, too short to be safe, readable by every
        user of the machine, or not plain text. Two roles with one token are an error too.
        """
        tokens: dict[Role, str] = {}
        for role in Role:
            token = _read(folder / role)
            for other, same in tokens.items():
                if same == token:
                    raise ConfigError(
                        "token_shared",
                        f"{folder}: the roles {other} and {role} have the same token; give each its own: {_REMEDY}.",
                        roles=[other, role],
                    )
            tokens[role] = token
        return cls(tokens)

    def role_of(self, authorization: str) -> Role | None:
        """Returns the role whose token an Authorization header carries; None for an unknown token.

        `Bearer TOKEN`, or Basic with the token as its password: a URL such as http://env:TOKEN@host:8000 makes
        clients that cannot set a header, such as Atropos' clients, send the token.
        """
        given = _presented(authorization)
        role = None
        for (
            candidate,
            token,
        ) in self._by_role.items():  # All of them, always, so that the time does not depend on the token.
            if hmac.compare_digest(given, token):
                role = candidate
        return role

    def __repr__(self) -> str:
        return f"Tokens({', '.join(self._by_role)})"


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


def _read(path: Path) -> str:
    try:
        mode = path.stat().st_mode
        token = path.read_text(encoding="ascii").strip()
    except FileNotFoundError as error:
        raise ConfigError(
            "token_file_missing", f"API_AUTH=token, but the token file is missing: {path}; {_REMEDY}.", path=path
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            "secret_file_not_ascii", f"token file {path} is not plain ASCII text; {_REMEDY}.", path=path
        ) from error
    except OSError as error:
        raise ConfigError(
            "secret_file_unreadable",
            f"token file {path} cannot be read ({error.strerror}); its owner or group must be this process' "
            "(in Compose: SECRETS_GID in .env, which `make secure` sets).",
            path=path,
        ) from error
    if not token:
        raise ConfigError("token_file_empty", f"token file {path} is empty; {_REMEDY}.", path=path)
    if len(token) < SHORTEST:
        raise ConfigError(
            "token_too_short",
            f"the token in {path} has {len(token)} characters, fewer than {SHORTEST}; {_REMEDY}.",
            path=path,
        )
    if len(token.split()) != 1:
        raise ConfigError(
            "secret_file_several_words",
            f"token file {path} holds more than one word; it must hold the token alone.",
            path=path,
        )
    if mode & stat.S_IROTH:
        raise ConfigError(
            "token_file_readable_by_all",
            f"every user of this machine may read the token file {path}; chmod o-rwx {path}",
            path=path,
        )
    return token


def _presented(authorization: str) -> bytes:
    """Returns the token in the header; empty if the header has no token. No role has an empty token."""
    scheme, _, value = authorization.strip().partition(" ")
    if scheme.lower() == "bearer":
        return value.strip().encode()
    if scheme.lower() == "basic":
        try:
            _, _, password = base64.b64decode(value.strip(), validate=True).partition(b":")
        except (binascii.Error, ValueError):
            return b""
        return password
    return b""
