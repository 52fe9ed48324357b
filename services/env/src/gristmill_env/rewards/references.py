"""Finds what a configuration points at: `path/to/file.py:function` or `package.module:function`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from gristmill.settings.nearest import did_you_mean
from gristmill_env.errors import RewardError


def load_reference(reference: str, folder: Path | None) -> Callable[..., Any]:
    """The function or class that `reference` names. `folder`: where a relative path is looked for first.

    Raises RewardError: no such file, module or function (those that are there are listed, and the nearest), or what
    the user's code raises on import, with its traceback.
    """
    where, _, attribute = reference.rpartition(":")
    if not where or not attribute:
        raise RewardError(f"'{reference}' names no function; write path/to/file.py:function or package.module:function")
    module = _from_file(where, folder) if where.endswith(".py") else _from_path(where)
    found = module
    for step in attribute.split("."):
        if not hasattr(found, step):
            names = _defined_in(module)
            raise RewardError(
                f"{where} has no '{attribute}'; it has {', '.join(names) or 'no function'}."
                f"{did_you_mean(attribute, names)}"
            )
        found = getattr(found, step)
    if not callable(found):
        raise RewardError(f"{reference} is a {type(found).__name__}, not a function or a class")
    return found


def import_error(where: str, error: BaseException) -> RewardError:
    """What is told of user code that fails on import: its own traceback, without the frames that led there."""
    frames = traceback.extract_tb(error.__traceback__)
    foreign = [frame for frame in frames if not frame.filename.startswith("<frozen") and frame.filename not in _OURS]
    told = "".join(traceback.format_list(foreign) + traceback.format_exception_only(error)).rstrip()
    return RewardError(f"{where} cannot be imported: {type(error).__name__}: {error}\n{told}")


_OURS = frozenset({__file__, importlib.__file__, importlib.metadata.__file__})


def _from_file(where: str, folder: Path | None) -> ModuleType:
    candidates = [base / where for base in (folder, Path.cwd()) if base is not None]
    path = next((candidate.resolve() for candidate in candidates if candidate.is_file()), None)
    if path is None:
        looked = " and ".join(dict.fromkeys(str(candidate) for candidate in candidates))
        raise RewardError(f"there is no file {where}; looked for {looked}")
    # A name of its own: two files called rewards.py are two modules, and functions of one file share theirs.
    name = f"gristmill_reward_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise import_error(str(path), error) from error
    return module


def _from_path(where: str) -> ModuleType:
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is not None and (where == error.name or where.startswith(f"{error.name}.")):
            raise RewardError(
                f"there is no module {error.name}: install it, put its folder on PYTHONPATH, or name its file "
                "(path/to/file.py:function)"
            ) from error
        raise import_error(where, error) from error
    except (Exception, SystemExit) as error:
        raise import_error(where, error) from error


def _defined_in(module: ModuleType) -> list[str]:
    here = {name: value for name, value in vars(module).items() if callable(value) and not name.startswith("_")}
    own = [name for name, value in here.items() if getattr(value, "__module__", None) == module.__name__]
    return sorted(own or here)
