"""The secrets that this machine knows, and the search for them in bytes that leave the machine.

A secret in a file may be written in another form: escaped in JSON or HTML, percent-encoded, in UTF-16, in base64. The
search knows these forms, and reads what gzip packed.
"""

from __future__ import annotations

import base64
import gzip
import html
import itertools
import json
import netrc
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Final
from urllib.parse import quote, quote_plus

from gristmill.deployment import env_file
from gristmill.internal.redaction import is_secret, remember, secrets_in_urls

SHORTEST: Final = 8
"""Least characters of a secret that is searched. Shorter values also occur in ordinary words."""
_OF_FILES: Final = ("_FILE", "_PATH")
"""Ends of the names of variables that name a file with a secret, such as GRISTMILL_API_TOKEN_FILE."""
_CHUNK: Final = 1 << 20
_UNPACKED: Final = 4 << 30
"""Most bytes of a gzip file that are searched."""
_GZIP: Final = b"\x1f\x8b"
_ZIP: Final = b"PK\x03\x04"
_PACKED: Final = (_ZIP, b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"PAR1", b"7z\xbc\xaf")
"""The beginnings of files whose content cannot be searched: zip, bzip2, xz, zstd, Parquet, 7z."""


def secrets_of(environ: Mapping[str, str], folder: Path) -> list[str]:
    """Returns the values that must not leave this machine, the longest first.

    `environ`: variables whose names say that they are secret, or that they name a file with a secret. The password and
    the secret parameters of a URL count in every variable, such as DATABASE_URL. `folder`: the project's folder, with
    `.env` and `.secrets/`. The hub's token and the passwords of ~/.netrc count too. Values of fewer than 8 characters
    are left out: `short_secrets` names them. Raises ConfigError for a broken `.env`.
    """
    secrets = {value for _, value in _known(environ, folder) if len(value) >= SHORTEST}
    return sorted(secrets, key=lambda value: (-len(value), value))


def short_secrets(environ: Mapping[str, str], folder: Path) -> list[str]:
    """Returns the names of the secrets that are too short to be searched."""
    return sorted({name for name, value in _known(environ, folder) if 0 < len(value) < SHORTEST})


def _known(environ: Mapping[str, str], folder: Path) -> Iterator[tuple[str, str]]:
    """Yields (name, value) of each secret. A value in `.env` counts even if a variable overrides it."""
    of_file = env_file(folder, {name: value for name, value in environ.items() if name == "COMPOSE_DISABLE_ENV_FILE"})
    home = Path(environ.get("HOME") or of_file.get("HOME") or Path.home())
    cache = Path(environ.get("XDG_CACHE_HOME") or of_file.get("XDG_CACHE_HOME") or home / ".cache")
    hub = Path(environ.get("HF_HOME") or of_file.get("HF_HOME") or cache / "huggingface")
    logins = hub / "stored_tokens"  # lines such as hf_token = hf_...
    for line in logins.read_text(errors="replace").splitlines() if logins.is_file() else []:
        if "=" in line:
            yield str(logins), line.partition("=")[2].strip()
    own = folder / ".secrets"
    files = [hub / "token", *(sorted(own.iterdir()) if own.is_dir() else [])]
    for name, value in [*env_file(folder, environ).items(), *of_file.items(), *environ.items()]:
        if name.endswith(_OF_FILES):
            files += [folder / value] if is_secret(name.rpartition("_")[0]) else []
        elif is_secret(name):
            yield name, value
        yield from ((name, secret) for secret in secrets_in_urls(value))
    for path in files:
        words = path.read_text(errors="replace").split() if path.is_file() else []
        if len(words) == 1:  # The user list of Redis has many words; its password has a file.
            yield str(path), words[0]
    place = Path(environ.get("NETRC") or home / ".netrc")
    if place.is_file():
        yield from ((f"{place}: {host}", password) for host, password in _passwords(place))


def _passwords(path: Path) -> Iterator[tuple[str, str]]:
    try:
        hosts = netrc.netrc(path).hosts
    except (netrc.NetrcParseError, UnicodeDecodeError):  # other programs may read it still
        words = path.read_text(errors="replace").split()
        yield from (("password", after) for word, after in itertools.pairwise(words) if word == "password")
        return
    for host, (_, _, password) in hosts.items():
        if password:
            yield host, password


def forms(secret: str) -> set[str]:
    """Returns the texts in which a file may hold the secret."""
    raw = secret.encode()
    variants = {
        secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], html.escape(secret),
        html.escape(secret, quote=False), quote(secret), quote(secret, safe=""), quote_plus(secret),
        repr(secret)[1:-1], ascii(secret)[1:-1], raw.hex(), raw.hex().upper(),
    }  # fmt: skip
    variants |= {one.replace("&#x27;", "&#39;").replace("&quot;", "&#34;") for one in variants if "&" in one}
    variants |= {re.sub("%[0-9A-F]{2}", lambda match: match[0].lower(), one) for one in variants if "%" in one}
    for before in range(3):  # In base64 the first and the last character depend on the bytes around the secret.
        coded = base64.b64encode(bytes(before) + raw)
        end = (before + len(raw)) * 4 // 3
        whole = coded[(0, 2, 3)[before] : end].decode()
        variants |= {whole, whole.replace("+", "-").replace("/", "_")}
    return {one for one in variants if len(one) >= SHORTEST}


class SecretSearch:
    """Finds secrets in bytes, in all their forms."""

    def __init__(self, secrets: Iterable[str]) -> None:
        """Makes `redact_text` mask the forms too."""
        patterns: set[bytes] = set()
        for secret in secrets:
            for one in forms(secret):
                remember(one)
                patterns.add(one.encode())
            patterns |= {secret.encode("utf-16-le"), secret.encode("utf-16-be"), secret.encode("latin-1", "ignore")}
        patterns = {one for one in patterns if len(one) >= SHORTEST}
        self._longest = max(map(len, patterns), default=1)
        longest_first = sorted(patterns, key=len, reverse=True)
        self._pattern = re.compile(b"|".join(map(re.escape, longest_first))) if patterns else None

    def finds(self, content: bytes) -> bool:
        """Returns whether the bytes have a secret."""
        return self._pattern is not None and self._pattern.search(content) is not None

    def finds_in(self, parts: Iterable[bytes]) -> bool:
        """Returns whether the parts, one after the other, have a secret."""
        end = b""
        for part in parts:
            content = end + part
            if self.finds(content):
                return True
            end = content[-(self._longest - 1) :] if self._longest > 1 else b""
        return False


def is_gzip(start: bytes) -> bool:
    """Returns whether a file that begins so is packed by gzip."""
    return start.startswith(_GZIP)


def cannot_be_searched(file: BinaryIO) -> bool:
    """Returns whether a file is packed in a form that the search does not read.

    It reads a zip file that compresses nothing, as torch writes it, because the members' bytes are in it unchanged.
    """
    file.seek(0)
    start = file.read(max(map(len, _PACKED)))
    if not start.startswith(_ZIP):
        return start.startswith(_PACKED)
    try:
        with zipfile.ZipFile(file) as packed:
            return any(member.compress_type != zipfile.ZIP_STORED for member in packed.infolist())
    except (zipfile.BadZipFile, NotImplementedError, ValueError):
        return True


def gzip_parts(file: BinaryIO) -> Iterator[bytes]:
    """Yields what gzip packed. Raises OSError for damage, and ValueError beyond the largest size that is searched."""
    total = 0
    try:
        with gzip.GzipFile(fileobj=file) as opened:
            while part := opened.read(_CHUNK):
                total += len(part)
                if total > _UNPACKED:
                    raise ValueError(f"it holds more than {_UNPACKED} bytes")
                yield part
    except (EOFError, zlib.error) as error:
        raise ValueError(f"it is not whole: {error}") from error
