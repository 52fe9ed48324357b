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
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "cli" / "src"))  # The packages may not be installed.

from gristmill_cli.local.secret_files import ACL, FILES, FOLDER, Secrets  # noqa: E402

NOTE = "# Written by `make secure`; `make secure ARGS=--off` takes it back."
SETTINGS = ("API_AUTH", "SECRETS_DIR", "SECRETS_GID")
OUTSIDE = {
    "hf_token": "HF_TOKEN_FILE",
    "hf_write_token": "HF_WRITE_TOKEN_FILE",
    "wandb_api_key": "WANDB_API_KEY_FILE",
}
"""Tokens of other sites, and the Compose variable that names each token's file. --off keeps these tokens."""


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
