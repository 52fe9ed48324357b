#!/usr/bin/env python3
"""Turn tokens and the Redis password on for the stacks of this folder, and off again.

    make secure               (python3 scripts/secure.py)         on; again: writes what is missing
    make secure ARGS=--off    (python3 scripts/secure.py --off)   off

On, it writes random tokens, a Redis password and the user list with it into .secrets/, and into .env what Compose needs
to use them. `docker compose up` and `make local` do from then on. docs/security.md tells what this protects.

Plain Python, without packages: it runs where only Docker is installed.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path

from redis_acl import users_acl

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ".secrets"
ROLES = ("env", "trainer", "admin")
PASSWORD, ACL = "redis_password", "users.acl"
FILES = (*ROLES, PASSWORD, ACL)
NOTE = "# Written by `make secure`; `make secure ARGS=--off` takes it back."
SETTINGS = ("API_AUTH", "SECRETS_DIR", "SECRETS_GID")


class SecretsError(Exception):
    """.secrets/ is there but not whole."""


@dataclass(frozen=True)
class Secrets:
    """The files in .secrets/. The folder is closed to everybody else, so on this machine only its owner reads them.

    Their group reads them too: the containers' users are others than the owner, and are put into his group.
    """

    folder: Path

    @classmethod
    def find(cls, root: Path) -> Secrets | None:
        """Those that `make secure` wrote; None when it is off. Raises SecretsError when some are missing."""
        found = cls(root / FOLDER)
        if not found.folder.exists():
            return None
        missing = [name for name in FILES if not (found.folder / name).is_file()]
        if missing:
            raise SecretsError(
                f"{found.folder} lacks {', '.join(missing)}: `make secure` writes what is missing, "
                "`make secure ARGS=--off` removes the rest."
            )
        return found

    def path(self, name: str) -> Path:
        return self.folder / name

    def write(self) -> list[str]:
        """Write what is missing. The user list is written always: the commands in it change with the API. Returns the
        names of new tokens and passwords."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self.folder.chmod(0o700)
        new = [name for name in (*ROLES, PASSWORD) if not self.path(name).exists()]
        for name in new:
            _write(self.path(name), secrets.token_urlsafe(32) + "\n")
        _write(self.path(ACL), users_acl(self.path(PASSWORD).read_text().strip()))
        return new

    def remove(self) -> None:
        for name in FILES:
            if self.path(name).exists():
                self.path(name).unlink()
        if self.folder.exists() and not any(self.folder.iterdir()):
            self.folder.rmdir()


def switch(env_file: Path, gid: int | None) -> None:
    """Make Compose use the secrets, or with None not any more: set or take back our lines of .env, no others."""
    lines = env_file.read_text().splitlines() if env_file.exists() else []
    kept = [line for line in lines if line != NOTE and line.partition("=")[0].strip() not in SETTINGS]
    if gid is not None:
        kept += [NOTE, "API_AUTH=token", f"SECRETS_DIR=./{FOLDER}", f"SECRETS_GID={gid}"]
    if kept:
        env_file.write_text("\n".join(kept) + "\n")
    elif env_file.exists():
        env_file.unlink()


def main(arguments: list[str], root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--off", action="store_true", help="remove them and go on without")
    options = parser.parse_args(arguments)
    here = Secrets(root / FOLDER)
    if options.off:
        switch(root / ".env", None)
        here.remove()
        print("off: no tokens and no Redis password. A stack that runs takes this up with: docker compose up --detach")
        return 0
    new = here.write()
    switch(root / ".env", here.folder.stat().st_gid)
    print(f"on: the API asks for tokens and Redis for a password ({here.folder}; new: {', '.join(new) or 'none'}).")
    print("A stack that runs takes this up with: docker compose up --detach --force-recreate")
    print(f'Ask the API so: curl -H "Authorization: Bearer $(cat {FOLDER}/admin)" http://127.0.0.1:8000/v1/runs')
    return 0


def _write(path: Path, text: str) -> None:
    """Replace the file at once; nobody else could read it at any time."""
    new = path.with_name(f".{path.name}.new")
    handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    new.chmod(0o640)
    new.replace(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
