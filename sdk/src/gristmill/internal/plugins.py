"""User code that a configuration names: `path/to/file.py:name` or `package.module:name`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from gristmill.errors import PluginError
from gristmill.internal.settings import did_you_mean


def is_plugin(name: str) -> bool:
    """Returns whether `name` is the place of code rather than a registered name."""
    return ":" in name


_OF_A_FILE = "gristmill_plugin_"
"""Beginning of the names of modules that are files."""


def is_from_file(module: ModuleType) -> bool:
    """Returns whether `load_plugin` loaded the module from a file, so that it cannot be imported by its name."""
    return module.__name__.startswith(_OF_A_FILE)


def load_plugin(name: str, folder: Path | None) -> Any:
    """Returns the object that `name` names.

    Searches a relative path first in `folder` (the configuration's folder), then in the working directory.

    Raises PluginError if the file, the module or the name in it does not exist. For a missing name, the message lists
    the existing names and the nearest match. Raises PluginError with the traceback if the user's code fails on import.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise PluginError(
            "plugin_name",
            f"'{name}' names no code; write path/to/file.py:name or package.module:name",
            name=name,
        )
    module = _from_file(place, folder) if place.endswith(".py") else _from_package(place)
    if not hasattr(module, attribute):
        names = _defined_in(module)
        raise PluginError(
            "plugin_attribute_missing",
            f"{place} has no '{attribute}'; it has {', '.join(names) or 'nothing'}.{did_you_mean(attribute, names)}",
            place=place,
            attribute=attribute,
            known=names,
        )
    return getattr(module, attribute)


def import_error(what: str, error: BaseException) -> PluginError:
    """Returns the error for user code that fails on import, with the traceback without Gristmill's and importlib's
    frames."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith("<frozen") and frame.filename not in _OURS]
    traceback_text = "".join(traceback.format_list(theirs) + traceback.format_exception_only(error)).rstrip()
    return PluginError(
        "plugin_import_failed",
        f"{what} cannot be imported: {type(error).__name__}: {error}\n{traceback_text}",
        what=what,
        error=type(error).__name__,
    )


_OURS = frozenset({__file__, importlib.__file__, importlib.metadata.__file__})


def _from_file(place: str, folder: Path | None) -> ModuleType:
    candidates = list(dict.fromkeys((base / place).resolve() for base in (folder, Path()) if base is not None))
    path = next((candidate for candidate in candidates if candidate.is_file()), None)
    if path is None:
        raise PluginError(
            "plugin_file_missing",
            f"{place} is not there; looked at {', '.join(map(str, candidates))}",
            candidates=candidates,
        )
    # The module's name contains a hash of the whole path: two files of one name are two modules, and one file is loaded
    # once.
    name = f"{_OF_A_FILE}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
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


def _from_package(place: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise import_error(f"module '{place}'", error) from error
        raise PluginError(
            "plugin_module_missing",
            f"module '{place}' cannot be imported: the module {error.name} is missing. Install it, put its folder on "
            "PYTHONPATH, or name a file (path/to/file.py:name)",
            module=error.name,
        ) from error
    except (Exception, SystemExit) as error:
        raise import_error(f"module '{place}'", error) from error


def _defined_in(module: ModuleType) -> list[str]:
    """Returns the names of the module's own functions and classes, or all its public names if it has none."""
    names = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    defined = [name for name, value in names.items() if getattr(value, "__module__", None) == module.__name__]
    return sorted(defined or names)
