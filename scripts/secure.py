#!/usr/bin/env python3
"""Turn tokens and the Redis password on for the stacks of this folder, and off again.

    make secure               (python3 scripts/secure.py)         on; again: writes what is missing
    make secure ARGS=--off    (python3 scripts/secure.py --off)   off
    make secure ARGS="--set hf_token"     asks for a token of another site: hf_token, hf_write_token, wandb_api_key

On, it writes random tokens, a Redis password and the user list with it into .secrets/, and into .env what Compose needs
to use them. `docker compose up` and `make local` do from then on. --set asks for a token, or reads it from standard
input, writes it to .secrets/ and names the file in .env; an empty answer removes both. docs/security.md says what each
secret protects.

Plain Python, without packages: it runs where only Docker is installed.
"""

from __future__ import annotations

import argparse
import getpass
import os
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path

from redis_acl import users_acl

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ".secrets"
ROLES = ("env", "trainer", "admin")
PASSWORD, AGENT, ACL = "redis_password", "agent", "users.acl"
RANDOM = (*ROLES, PASSWORD, AGENT)
FILES = (*RANDOM, ACL)
NOTE = "# Written by `make secure`; `make secure ARGS=--off` takes it back."
SETTINGS = ("API_AUTH", "SECRETS_DIR", "SECRETS_GID")
OUTSIDE = {
    "hf_token": "HF_TOKEN_FILE",
    "hf_write_token": "HF_WRITE_TOKEN_FILE",
    "wandb_api_key": "WANDB_API_KEY_FILE",
}
"""Tokens of other sites, and the Compose variable that names each token's file. --off keeps these tokens."""


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
        found = cls(root / FOLDER)
        missing = [name for name in FILES if not (found.folder / name).is_file()]
        if len(missing) == len(FILES):
            return None
        if missing:
            raise SecretsError(
                f"{found.folder} lacks {', '.join(missing)}: `make secure` writes what is missing, "
                "`make secure ARGS=--off` removes the rest.",
                missing,
            )
        return found

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


def update(env_file: Path, here: Secrets) -> None:
    """Makes Compose use the existing files. Replaces only the lines of .env that this script wrote."""
    tokens = {f"{variable}=./{FOLDER}/{name}": here.path(name).exists() for name, variable in OUTSIDE.items()}
    lines = env_file.read_text().splitlines() if env_file.exists() else []
    kept = [line for line in lines if line not in (NOTE, *tokens) and line.partition("=")[0].strip() not in SETTINGS]
    new = [line for line, there in tokens.items() if there]
    if here.path(ACL).exists():
        new += ["API_AUTH=token", f"SECRETS_DIR=./{FOLDER}"]
    if new:
        kept += [NOTE, *new, f"SECRETS_GID={here.folder.stat().st_gid}"]
    if kept:
        env_file.write_text("\n".join(kept) + "\n")
    elif env_file.exists():
        env_file.unlink()


def main(arguments: list[str], root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--off", action="store_true", help="remove the API's tokens and Redis' password")
    action.add_argument("--set", choices=list(OUTSIDE), help="a token of another site")
    options = parser.parse_args(arguments)
    here = Secrets(root / FOLDER)
    if options.set:
        here.keep(options.set, _ask(options.set))
        update(root / ".env", here)
        file = here.path(options.set)
        print(f"{options.set}: {f'in {file}' if file.exists() else 'none'}")
    elif options.off:
        here.remove(*FILES)
        update(root / ".env", here)
        print("off: no tokens and no Redis password.")
    else:
        new = here.write()
        update(root / ".env", here)
        print(f"on: the API asks for tokens and Redis for a password ({here.folder}; new: {', '.join(new) or 'none'}).")
        print(f'Ask the API so: curl -H "Authorization: Bearer $(cat {FOLDER}/admin)" http://127.0.0.1:8000/v1/runs')
    print("A stack that runs takes this up with: docker compose up --detach --force-recreate")
    return 0


def _ask(name: str) -> str:
    """Reads a token, without echo at a terminal. Exits if the answer has several words."""
    text = getpass.getpass(f"{name}: ") if sys.stdin.isatty() else sys.stdin.readline()
    if len(text.split()) > 1:
        sys.exit(f"{name} is one word; the answer has several")
    return text.strip()


def _write(path: Path, text: str) -> None:
    """Replaces the file atomically. Other users cannot read it at any time."""
    new = path.with_name(f".{path.name}.new")
    handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    new.chmod(0o640)
    new.replace(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
