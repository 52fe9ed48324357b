"""What the sandbox runs for a task of Harbor: a program of the model, or the task's tests.

`harbor.py` sends this file's text with a call of `main` behind it. The folder of the run stands for the root of the
task's container: paths such as /app/data.csv mean files below it, for Python's `open`, `os` and `pathlib`.
"""

from __future__ import annotations

import base64
import builtins
import contextlib
import functools
import importlib.util
import io
import json
import os
import sys
import traceback
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

PATHS = (
    "open", "stat", "lstat", "listdir", "scandir", "mkdir", "remove", "unlink", "rmdir", "rename", "replace", "link",
    "symlink", "readlink", "chdir", "access", "chmod", "utime", "truncate",
)  # fmt: skip
"""Functions of `os` whose first one or two arguments may be paths."""


def main(given: dict[str, Any]) -> None:
    """Prints a line of JSON: {output, files} of a program, {passed, reward, missing, output} of tests.

    `given`: `folders` that the container has, `files` as base64 by path, `workdir`, and `program` or `tests`: a list
    of "pytest" or "python" and the file's arguments.
    """
    _redirect(str(Path.cwd()), set(given["folders"]))
    for folder in given["folders"]:
        Path(folder).mkdir(parents=True, exist_ok=True)
    for path, content in given["files"].items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(base64.b64decode(content))
    os.chdir(given["workdir"])
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        found = _tested(*given["tests"]) if "tests" in given else _ran(given["program"], given["folders"])
    os.write(1, b"\n" + json.dumps({**found, "output": output.getvalue()}).encode("utf-8", "surrogateescape"))


def _ran(program: str, folders: list[str]) -> dict[str, Any]:
    sys.argv = ["program.py"]
    _code(lambda: exec(compile(program, "<program>", "exec"), {"__name__": "__main__"}))
    found = [path for folder in folders for path in Path(folder).rglob("*") if path.is_file() and not path.is_symlink()]
    return {"files": {str(path): base64.b64encode(path.read_bytes()).decode() for path in found}}


def _tested(kind: str, path: str, *arguments: str) -> dict[str, Any]:
    missing: list[str] = []
    sys.path.insert(0, str(Path(path).parent))
    sys.argv = [path, *arguments]
    if kind == "python":
        code = _code(lambda: _executed(path, "__main__"), missing)
    elif importlib.util.find_spec("pytest"):
        code = _code(lambda: sys.exit(_pytest(path)), missing)
    else:
        code = _code(lambda: _functions(path), missing)
    written = [Path("/logs/verifier", name) for name in ("reward.json", "reward.txt")]
    rewards = {path.name: path.read_text(errors="replace") for path in written if path.is_file()}
    return {"passed": code == 0, "rewards": rewards, "missing": missing}


def _pytest(path: str) -> int:
    import pytest

    # Real paths: pytest looks up some of them in ways that `_redirect` does not cover.
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", ROOT[0], "--confcutdir", ROOT[0]]
    return int(pytest.main([*options, "--import-mode=importlib", ROOT[0] + path]))


def _functions(path: str) -> None:
    """Calls the test functions of a file, without pytest."""
    for name, test in list(_executed(path, "tests").items()):
        if name.startswith("test") and callable(test):
            test()
        elif name.startswith("Test") and isinstance(test, type):
            for method in [method for method in dir(test) if method.startswith("test")]:
                getattr(test(), method)()


def _executed(path: str, name: str) -> dict[str, Any]:
    made: dict[str, Any] = {"__name__": name, "__file__": path}
    exec(compile(Path(path).read_bytes(), path, "exec"), made)
    return made


def _code(call: Callable[[], object], missing: list[str] | None = None) -> int:
    """Returns the exit code. `missing`: receives the name of a package that is not there."""
    try:
        call()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:  # noqa: BLE001  whatever a program raises is its end
        if missing is not None and isinstance(error, ModuleNotFoundError) and error.name:
            missing.append(error.name)
        ours = error.__traceback__
        while ours is not None and ours.tb_frame.f_code.co_filename == main.__code__.co_filename:
            ours = ours.tb_next
        traceback.print_exception(error.with_traceback(ours))
        return 1
    return 0


class _Finder:
    """Finds the modules of folders of the container that are in sys.path, as importlib does not use `os`."""

    def __init__(self, places: Callable[[], list[str]]) -> None:
        self._places = places

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return PathFinder.find_spec(name, self._places()) if path is None else None


ROOT: list[str] = []
"""The folder of the run."""


def _redirect(root: str, folders: set[str]) -> None:
    ROOT.append(root)
    tops = {folder.split("/")[1] for folder in folders}
    getcwd = os.getcwd

    def mapped(path: Any) -> Any:
        if isinstance(path, str | os.PathLike):
            text = os.fspath(path)
            if isinstance(text, str) and text.startswith("/") and not (text + "/").startswith(root + "/"):
                text = os.path.normpath(text)
                return root + text if text.split("/")[1] in tops else path
        return path

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            return function(*map(mapped, arguments[:2]), *arguments[2:], **named)

        return call

    for name in PATHS:
        setattr(os, name, wrapped(getattr(os, name)))
    builtins.open = io.open = wrapped(io.open)
    sys.meta_path.append(_Finder(lambda: [mapped(place) for place in sys.path if mapped(place) != place]))
    os.getcwd = lambda: getcwd().removeprefix(root) or "/"
