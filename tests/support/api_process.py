"""The API's process as a fork of a process that has imported the API's packages: the imports take most of a start.

multiprocessing's forkserver imports this module once per session. Tests of the launcher, of the containers and of `make
local` start `python -m gristmill_api` itself.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gristmill_api import app, notifications, server
from gristmill_api.store import scripts

RECHECK = "RECHECK_S"
"""Variable with the seconds between two checks of a waiting request. After long ones only a notification wakes it."""
SCRIPTS = "SCRIPTS_FOLDER"
"""Variable with a folder whose lua/*.lua the API runs, in place of its package's. tests/mutation sets it."""

# This application has the settings of the tests' own process. Each fork creates another from its variables.
del sys.modules[app.__name__]


def run(
    arguments: Sequence[str],
    environ: Mapping[str, str],
    log: Path,
    bounds: Mapping[int, tuple[int, int]],
    listener: socket.socket | None,
) -> None:
    """Does what `python -m gristmill_api ARGUMENTS` does, in this process. Does not return before the API ends.

    `bounds`: soft and hard limits, by the number of the resource. `listener`: kept open, for `--fd`.
    """
    for bound, values in bounds.items():
        resource.setrlimit(bound, values)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = os.fdopen(0, closefd=False)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.clear()
    os.environ.update(environ)
    if seconds := environ.get(RECHECK):
        vars(notifications)["RECHECK_S"] = float(seconds)
    if folder := environ.get(SCRIPTS):
        vars(scripts)["files"] = lambda package: Path(folder)
    given = [] if listener is None else ["--fd", str(listener.fileno())]
    sys.argv = ["gristmill_api", *arguments, *given]
    server.main()
