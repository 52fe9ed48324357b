"""Code of the user's own, named in a configuration: `path/to/file.py:name` or `package.module:name`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from gristmill.settings.nearest import did_you_mean
from gristmill_env.errors import PluginError


def is_plugin(name: str) -> bool:
    """Whether `name` says where code is, and is no registered name."""
    return ":" in name


def load_plugin(name: str, folder: Path | None) -> Any:
    """What `name` stands for. A relative path is looked for in `folder` (the configuration's) first, then here.

    Raises PluginError: no such file, module or name in it, or it cannot be imported.
    """
    place, _, attribute = name.rpartition(":")
    module = _from_file(place, folder) if place.endswith(".py") else _from_package(place)
    if not hasattr(module, attribute):
        there = [key for key in vars(module) if not key.startswith("_")]
        raise PluginError(
            f"{place} has no '{attribute}'; it has {', '.join(there) or 'nothing'}.{did_you_mean(attribute, there)}"
        )
    return getattr(module, attribute)


def _from_file(place: str, folder: Path | None) -> ModuleType:
    candidates = [(base / place).resolve() for base in (folder, Path()) if base is not None]
    path = next((candidate for candidate in candidates if candidate.is_file()), None)
    if path is None:
        raise PluginError(f"{place} is not there; looked at {', '.join(map(str, dict.fromkeys(candidates)))}")
    # Named by its whole path: two files of one name are two modules, and one file is loaded once.
    name = f"gristmill_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code may raise anything; it is the cause that is shown
        del sys.modules[name]
        raise PluginError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _from_package(place: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except Exception as error:
        raise PluginError(
            f"module '{place}' cannot be imported: {type(error).__name__}: {error}; is it installed, or did you mean a "
            "file (path/to/file.py:name)?"
        ) from error
