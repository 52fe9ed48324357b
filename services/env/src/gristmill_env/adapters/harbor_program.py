"""The program that the sandbox runs for a task of Harbor: a program of the model, or the task's tests.

`harbor.py` sends this file's text with a call of `main` behind it. The folder of the run replaces the root of the
task's container: paths such as /app/data.csv mean files below it, for Python's `open`, `os` and `pathlib`.
"""

from __future__ import annotations

import base64
import builtins
import contextlib
import functools
import importlib.util
import inspect
import io
import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

PATHS = (
    "open", "stat", "lstat", "listdir", "scandir", "mkdir", "remove", "unlink", "rmdir", "rename", "replace", "link",
    "symlink", "readlink", "chdir", "access", "chmod", "utime", "truncate",
)  # fmt: skip
"""Functions of `os` whose first one or two arguments may be paths."""
OUTPUT = 2**14
"""Characters of the output that are sent: the last ones."""
PYTEST = re.compile(r"set_?up|tear_?down|pytest|load_tests|__test__", re.IGNORECASE)
"""Beginnings of names that pytest or unittest treats in a way that `_functions` does not."""


def main(given: dict[str, Any]) -> None:
    """Prints a line of JSON: {output, files} of a program, {passed, rewards, missing, failed, output} of tests.

    `given`: `folders` that the container has, `files` as base64 by path, `workdir`, and `program` or `tests`: a list
    of "pytest", "-m pytest" or "python", the file, and its arguments. `packages`: that must be there.
    """
    root = str(Path.cwd())
    if absent := [name for name in given.get("packages", ()) if not _is_installed(name)]:
        os.write(1, b"\n" + json.dumps({"failed": f"they need {', '.join(absent)}"}).encode())
        return
    if "tests" in given:
        # Otherwise a file of the model, such as /app/csv.py, could replace a module that the tests import.
        sys.path[:] = [place for place in sys.path if place.startswith("/") and not f"{place}/".startswith(f"{root}/")]
    _redirect(root, set(given["folders"]))
    try:
        for folder in given["folders"]:
            Path(folder).mkdir(parents=True, exist_ok=True)
        for path, content in given["files"].items():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_bytes(base64.b64decode(content))
        os.chdir(given["workdir"])
    except (OSError, ValueError) as error:
        os.write(1, b"\n" + json.dumps({"failed": f"the task's files: {error!r:.300}"}).encode())
        return
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        result = _tested(*given["tests"]) if "tests" in given else _ran(given["program"], given["folders"])
    os.write(1, b"\n" + json.dumps({**result, "output": output.getvalue()[-OUTPUT:]}).encode("utf-8"))


def _is_installed(package: str) -> bool:
    from importlib import metadata

    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False


def _ran(program: str, folders: list[str]) -> dict[str, Any]:
    sys.argv = ["program.py"]
    _code(lambda: exec(compile(program, "<program>", "exec", dont_inherit=True), {"__name__": "__main__"}))
    paths = [path for folder in folders for path in Path(folder).rglob("*") if path.is_file() and not path.is_symlink()]
    return {"files": {str(path): base64.b64encode(path.read_bytes()).decode() for path in paths}}


def _tested(kind: str, path: str, *arguments: str) -> dict[str, Any]:
    missing: list[str] = []
    if not (has_pytest := importlib.util.find_spec("pytest") is not None):
        sys.modules["pytest"] = None  # type: ignore[assignment]  # Otherwise the tests could import the model's.
    sys.path.insert(0, str(Path(path).parent))
    if kind == "-m pytest":
        IMPORTED.append(f"{ROOT[0]}{Path.cwd()}")  # `python -m` has the working folder in its path.
    sys.argv = [path, *arguments]
    if kind == "python":
        code = _code(lambda: _executed(path, "__main__"), missing)
    elif has_pytest:
        code = _code(lambda: sys.exit(_pytest(path)), missing)
    else:
        code = _code(lambda: _functions(path), missing)
    written = [Path("/logs/verifier", name) for name in ("reward.json", "reward.txt")]
    rewards = {path.name: path.read_text(errors="replace") for path in written if path.is_file()}
    unused = kind != "python" and has_pytest and code in (4, 5)
    failed = f"pytest ended with {code}, so it found no test" if unused else None
    return {"passed": code == 0, "rewards": rewards, "missing": missing, "failed": failed}


def _pytest(path: str) -> int:
    import pytest

    # Real paths: pytest looks up some of them in ways that `_redirect` does not cover. Settings and conftest.py of
    # other folders than the tests' have no effect. `-s`, because the sandbox limits the file of captured output.
    tests = f"{ROOT[0]}/tests"
    options = ["-q", "-s", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", tests, "--confcutdir", tests]
    return int(pytest.main([*options, "--import-mode=importlib", ROOT[0] + path]))


def _functions(path: str) -> None:
    """Calls the test functions of a file, without pytest. Raises ModuleNotFoundError if the file needs pytest."""
    made = _executed(path, "tests")
    names, tests = [*made], list[Any]()
    plain = not Path(path).with_name("conftest.py").exists()
    for name, value in made.items():
        if name.startswith("test"):
            tests.append(value)
        elif isinstance(value, type):
            plain = plain and all(base.__name__ != "TestCase" for base in value.__mro__)
            if name.startswith("Test"):
                names += dir(value)
                plain = (
                    plain
                    and not any("__init__" in vars(base) for base in value.__mro__[:-1])
                    and not any(n[:4] == "Test" for n in dir(value))
                )
                tests += [getattr(value(), method) for method in dir(value) if plain and method.startswith("test")]
    if not (plain and tests and all(map(_is_plain, tests)) and not any(map(PYTEST.match, names))):
        raise ModuleNotFoundError("the tests need pytest", name="pytest")
    for test in tests:
        test()


def _is_plain(test: Any) -> bool:
    kinds = inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction
    is_function = isinstance(test, FunctionType | MethodType) and not any(kind(test) for kind in kinds)
    return is_function and not inspect.signature(test).parameters


def _executed(path: str, name: str) -> dict[str, Any]:
    made: dict[str, Any] = {"__name__": name, "__file__": path}
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), made)
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
IMPORTED: list[str] = []
"""Real paths of more folders for `_Finder`. In sys.path, pytest would also look there for plugins."""


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
    sys.meta_path.append(_Finder(lambda: [*(mapped(place) for place in sys.path if mapped(place) != place), *IMPORTED]))
    os.getcwd = lambda: getcwd().removeprefix(root) or "/"
