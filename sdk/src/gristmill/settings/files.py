"""Finding and reading configuration files."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from gristmill.errors import ConfigError
from gristmill.redaction import is_secret, remember
from gristmill.settings.nearest import did_you_mean

_VARIABLE = re.compile(r"\$(?:\$|\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\})")


def find_config(name: str, config_dir: Path) -> Path:
    """Returns the file that `--config NAME` means: NAME as a path if that file exists, else `config_dir`/NAME.yaml.

    Raises ConfigError with a list of the existing names.
    """
    path = Path(name)
    if path.is_file():
        return path
    for suffix in ("", ".yaml", ".yml"):
        candidate = config_dir / f"{name}{suffix}"
        if candidate.is_file():
            return candidate
    names = sorted(path.stem for path in config_dir.glob("*.y*ml")) if config_dir.is_dir() else []
    there = ", ".join(names) if names else "none"
    hint = did_you_mean(name, names)
    raise ConfigError(
        "config_missing",
        f"no config '{name}': it is neither a file nor a name in {config_dir}/ (there: {there}).{hint}",
        name=name,
    )


def load_yaml(path: Path, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Reads a YAML mapping and replaces ${VAR} and ${VAR:-default} from `environ` (os.environ by default).

    `$$` is a plain dollar sign. The value of a variable with a secret's name (API_KEY) is redacted from then on. Raises
    ConfigError for a missing file, broken YAML or an unset variable.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError("config_unreadable", f"cannot read config {path}: {error.strerror}", path=path) from error
    try:
        loaded = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError("invalid_yaml", f"{path} is not valid YAML: {error}", path=path) from error
    if not isinstance(loaded, dict):
        raise ConfigError("not_a_mapping", f"{path} must hold key: value pairs at its top level", path=path)
    filled = _fill(loaded, os.environ if environ is None else environ, str(path))
    assert isinstance(filled, dict)
    return filled


def _fill(value: Any, environ: Mapping[str, str], where: str) -> Any:
    if isinstance(value, dict):
        return {key: _fill(item, environ, f"{where}: {key}") for key, item in value.items()}
    if isinstance(value, list):
        return [_fill(item, environ, where) for item in value]
    if not isinstance(value, str):
        return value

    def replace(match: re.Match[str]) -> str:
        name, default = match["name"], match["default"]
        if name is None:
            return "$"
        # As in a shell, ":-" also replaces a variable that is set but empty.
        if environ.get(name) or (name in environ and default is None):
            if is_secret(name):
                remember(environ[name])
            return environ[name]
        if default is None:
            raise ConfigError(
                "variable_unset",
                f"{where}: ${{{name}}} is not set; export {name}, or give a default: ${{{name}:-value}}",
                where=where,
                variable=name,
            )
        return default

    return _VARIABLE.sub(replace, value)
