"""The files in .secrets/: tokens, the Redis password and the user list.

`make secure` writes the files, and the launcher passes them to the services. This module needs no packages, because
scripts/secure.py imports it on machines that have only Docker.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from gristmill_cli.local.redis_acl import users_acl

FOLDER = ".secrets"
ROLES = ("env", "trainer", "admin")
PASSWORD, AGENT, ACL = "redis_password", "agent", "users.acl"
RANDOM = (*ROLES, PASSWORD, AGENT)
FILES = (*RANDOM, ACL)


class SecretsError(Exception):
    """.secrets/ exists but lacks files. Not a GristmillError, because this script also runs without the packages."""

    code = "secrets_missing"

    def __init__(self, message: str, missing: list[str]) -> None:
        super().__init__(message)
        self.missing = missing


@dataclass(frozen=True)
class Secrets:
    """The files in .secrets/. Only the owner can open the folder, so no other user of this machine can read the files.

    The files are readable for their group, because the containers' users differ from the owner and join that group.
    """

    folder: Path

    @classmethod
    def find(cls, root: Path) -> Secrets | None:
        """Returns the secrets that `make secure` wrote, or None if it wrote none. Raises SecretsError if some are
        missing."""
        secrets = cls(root / FOLDER)
        missing = [name for name in FILES if not (secrets.folder / name).is_file()]
        if len(missing) == len(FILES):
            return None
        if missing:
            raise SecretsError(
                f"{secrets.folder} lacks {', '.join(missing)}: `make secure` writes what is missing, "
                "`make secure ARGS=--off` removes the rest.",
                missing,
            )
        return secrets

    def path(self, name: str) -> Path:
        return self.folder / name

    def write(self) -> list[str]:
        """Writes missing tokens and passwords and returns their names. Always writes the user list, because its
        commands change with the API."""
        self._open()
        new = [name for name in RANDOM if not self.path(name).exists()]
        for name in new:
            _write(self.path(name), secrets.token_urlsafe(32) + "\n")
        _write(self.path(ACL), users_acl(self.path(PASSWORD).read_text().strip()))
        return new

    def keep(self, name: str, word: str) -> None:
        """Writes a token of another site. An empty word removes the token."""
        if word:
            self._open()
            _write(self.path(name), word + "\n")
        else:
            self.remove(name)

    @staticmethod
    def close_to_others(*folders: Path) -> None:
        """Keeps other accounts out of the folders, and out of all files that this process and its children write.

        A folder that belongs to another account keeps its mode.
        """
        os.umask(0o077)
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            if folder.stat().st_uid == os.getuid():
                folder.chmod(0o700)

    def remove(self, *names: str) -> None:
        """Removes files, and the folder if it is then empty."""
        for name in names:
            self.path(name).unlink(missing_ok=True)
        if self.folder.exists() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _open(self) -> None:
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self.folder.chmod(0o700)


def _write(path: Path, text: str) -> None:
    """Replaces the file atomically. Other users cannot read it at any time.

    `make secure` runs this file without our packages, so `gristmill.internal.disk.write_file` is not here.
    """
    new = path.with_name(f".{path.name}.new")
    handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    new.chmod(0o640)
    new.replace(path)
