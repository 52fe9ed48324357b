"""Lists the source files that run for one item, in every Python process with this folder in PYTHONPATH.

GRISTMILL_TRACE is JSON: `folder` receives one file per process, with one line per source file. `tasks` and `spans` name
functions as "gristmill_env/worker.py:Worker._work". A function of `tasks` marks the asyncio task that calls it, and the
tasks and threads with a copy of the task's context. A function of `spans` marks all threads until the function returns,
except the thread that writes a checkpoint, because it runs at the same time as any of them.
"""

from __future__ import annotations

import contextvars
import json
import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

_PLAN = json.loads(os.environ["GRISTMILL_TRACE"])
_TASKS, _SPANS = set(_PLAN["tasks"]), set(_PLAN["spans"])
_OUTPUT = Path(_PLAN["folder"]) / f"{os.getpid()}.txt"
_marked: contextvars.ContextVar[bool] = contextvars.ContextVar("marked", default=False)
_open_spans = 0
_paths: dict[str, str | None] = {}
_seen: set[str] = set()


def _path(filename: str) -> str | None:
    """Returns the path inside src/ of a file of Gristmill, or None."""
    _, found, path = filename.rpartition("/src/")
    return path if found and path.startswith("gristmill") else None


def _watch(frame: FrameType, event: str, argument: Any) -> None:
    global _open_spans
    code = frame.f_code
    if code.co_filename not in _paths:
        _paths[code.co_filename] = _path(code.co_filename)
    path = _paths[code.co_filename]
    if path is None or code.co_name == "<module>" or event not in {"call", "return"}:
        return
    name = f"{path}:{code.co_qualname}"
    if name in _SPANS:
        _open_spans += 1 if event == "call" else -1
    elif name in _TASKS:
        _marked.set(True)
    beside = _open_spans and threading.current_thread().name == "checkpoint"
    if event == "call" and (_open_spans or _marked.get()) and not beside:
        _add(path)
        if name == "gristmill_api/store/scripts.py:Scripts.run":
            _add(f"gristmill_api/store/lua/{frame.f_locals['name']}.lua")


def _add(path: str) -> None:
    if path not in _seen:
        _seen.add(path)
        with _OUTPUT.open("a") as file:
            file.write(path + "\n")


sys.setprofile(_watch)
threading.setprofile(_watch)
