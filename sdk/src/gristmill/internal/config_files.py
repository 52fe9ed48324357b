"""Configuration files: YAML with the values of environment variables, `${VAR}`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from gristmill.errors import ConfigError
from gristmill.internal.redaction import is_secret, remember
from gristmill.internal.settings import did_you_mean

_VARIABLE = re.compile(r"\$(?:\$|\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<plain>:plain)?(?::-(?P<default>[^}]*))?\})")
"""${VAR}, ${VAR:-default}, ${VAR:plain}, ${VAR:plain:-default} and $$."""


def load_yaml(path: Path, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Reads a YAML mapping and replaces ${VAR} and ${VAR:-default} from `environ` (os.environ by default).

    `$$` is a plain dollar sign. The value of a variable is redacted from then on, unless the file says `${VAR:plain}`
    and the name is not a secret's name (API_KEY). Raises ConfigError for a missing file, broken YAML or an unset
    variable.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        hint = readable_by_all(path) if isinstance(error, PermissionError) else ""
        text = f"cannot read config {path}: {error.strerror}{hint}"
        raise ConfigError("config_unreadable", text, path=path) from error
    try:
        loaded = read_yaml(raw.decode("utf-8-sig"))
    except _TwiceError as twice:
        key, line, first = twice.args
        text = f"{path}, {twice}"
        raise ConfigError("duplicate_key", text, path=path, key=key, line=line, first=first) from twice
    except ValueError as error:
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
            if match["plain"] is None or is_secret(name):
                remember(environ[name])
            return environ[name]
        if default is None:
            raise ConfigError(
                "variable_unset",
                f"{where}: ${{{name}}} is not set; export {name} (for Compose, see docs/configuration.md), or give a "
                f"default: ${{{name}:-value}}",
                where=where,
                variable=name,
            )
        return default

    return _VARIABLE.sub(replace, value)


class _TwiceError(ValueError):
    """A key, the line in which it is set again, and the line in which it was set first."""

    def __str__(self) -> str:
        key, line, first = self.args
        return f"line {line}: '{key}' is set again (first in line {first}); keep one of them"


class _OneOfEachKey(yaml.SafeLoader):
    """Refuses a mapping with the same key twice. YAML forbids it; PyYAML keeps the last value without a word."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if (key.tag, key.value) in lines:
                raise _TwiceError(key.value, line, lines[key.tag, key.value])
            lines[key.tag, key.value] = line
        return node


def read_yaml(text: str) -> Any:
    """Returns the value of a YAML text. Raises ValueError, whose text is one line, with the place of the problem.

    All keys must be text: YAML reads the keys `on` and `1` as a truth value and a number, which JSON has not as keys.
    """
    try:
        value = yaml.load(text, _OneOfEachKey)
        _check_keys(value)
    except RecursionError as error:
        raise ValueError("it contains itself, or is nested too deep") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        if mark is None:
            raise ValueError(" ".join(str(error).split())) from error
        problem = ", ".join(filter(None, (getattr(error, "context", None), getattr(error, "problem", None))))
        raise ValueError(f"line {mark.line + 1}, column {mark.column + 1}: {problem}") from error
    return value


def _check_keys(value: Any) -> None:
    for key, inner in value.items() if isinstance(value, dict) else ():
        if not isinstance(key, str):
            raise ValueError(f"the key {key!r} is not text; put it in quotes")
        _check_keys(inner)
    for inner in value if isinstance(value, list) else ():
        _check_keys(inner)


def find_config(name: str, config_dir: Path) -> Path:
    """Returns the file that `--config NAME` means: NAME as a path if that file exists, else `config_dir`/NAME.yaml.

    Raises ConfigError with a list of the existing names.
    """
    candidates = [Path(name), *(config_dir / f"{name}{suffix}" for suffix in ("", ".yaml", ".yml"))]
    for candidate in candidates:
        try:
            if candidate.is_file():
                return candidate
        except PermissionError as error:  # of a folder above the file
            text = f"cannot read config {candidate}: {error.strerror}{readable_by_all(candidate)}"
            raise ConfigError("config_unreadable", text, path=candidate) from error
    names = sorted(path.stem for path in config_dir.glob("*.y*ml")) if config_dir.is_dir() else []
    existing = ", ".join(names) if names else "none"
    hint = did_you_mean(name, names)
    raise ConfigError(
        "config_missing",
        f"no config '{name}': it is neither a file nor a name in {config_dir}/ (there: {existing}).{hint}",
        name=name,
    )


def readable_by_all(path: Path) -> str:
    """Returns the remedy for a file that may not be read: "chmod -R a+rX" with the closed folder above it, or the file.

    The services of the stack run as a user of the container (10001). This user does not own mounted files.
    """
    path = path.absolute()
    closed = path
    for above in reversed([path, *path.parents]):
        wanted = os.R_OK | os.X_OK if above.is_dir() else os.R_OK
        if not os.access(above, wanted, effective_ids=True):
            closed = above
            break
    return f"; make it readable, also for the container's user 10001: chmod -R a+rX {closed}"
