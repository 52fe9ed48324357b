"""Loads an environment by its id, once, and rejects environments that need more than one prompt and one reply."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from gristmill.errors import PluginError
from gristmill.settings.nearest import did_you_mean
from gristmill_env.errors import DatasetError
from gristmill_env.plugs.verifiers.failures import tell_failures

_INSTALL = 'pip install "verifiers>=0.2,<0.4"'
_SPLITS = {"train": "build_dataset", "eval": "build_eval_dataset"}

_loaded: dict[str, Any] = {}
"""Environments by id and arguments, so that rows and rewards of a run use the same environment."""


def load_environment(environment_id: str, arguments: Mapping[str, Any]) -> Any:
    """Returns the vf.SingleTurnEnv from vf.load_environment; the same object for the same id and arguments.

    The environment's rubric reports the failures of its functions (see `failures`). Call this function on the main
    thread, because verifiers sets signal handlers. Raises PluginError if verifiers or the environment's package is not
    installed, or if its code fails. Also raises it if the environment needs more than one prompt and one reply.
    """
    key = json.dumps([environment_id, dict(arguments)], sort_keys=True, default=repr)
    if key not in _loaded:
        vf = _verifiers(environment_id)
        with _own_signals():
            environment = _load(vf, environment_id, arguments)
        _check(vf, environment_id, environment)
        tell_failures(environment.rubric)
        _loaded[key] = environment
    return _loaded[key]


def environment_rows(environment_id: str, arguments: Mapping[str, Any], split: str) -> Any:
    """Returns the environment's data set, a datasets.Dataset whose column `prompt` holds messages.

    `split`: train or eval. Raises PluginError like `load_environment`, DatasetError when the split does not exist or
    cannot be built.
    """
    label = f"verifiers environment '{environment_id}'"
    if split not in _SPLITS:
        raise DatasetError(
            "split_missing",
            f"{label} has no split '{split}'; it has train and eval.{did_you_mean(split, _SPLITS)}",
            split=split,
            known=list(_SPLITS),
        )
    environment = load_environment(environment_id, arguments)
    try:
        rows = getattr(environment, _SPLITS[split])()
    except Exception as error:  # the environment's code
        raise DatasetError(
            "environment_raised",
            f"{label}: its {split} data cannot be built: {type(error).__name__}: {error}",
            environment=environment_id,
            split=split,
            error=type(error).__name__,
        ) from error
    if rows is None:
        raise DatasetError(
            "split_missing",
            f"{label} has no {split} data; set split to {'eval' if split == 'train' else 'train'}",
            environment=environment_id,
            split=split,
        )
    return rows


def _verifiers(environment_id: str) -> Any:
    try:
        import verifiers
    except ImportError as error:
        raise PluginError(
            "package_missing",
            f"verifiers environment '{environment_id}' needs the package verifiers, which cannot be imported "
            f"({error}): {_INSTALL}",
            extra="verifiers",
        ) from error
    if not hasattr(verifiers, "SingleTurnEnv"):
        version = getattr(verifiers, "__version__", "as it is installed")
        raise PluginError(
            "extra_version",
            f"verifiers environment '{environment_id}' cannot be loaded: verifiers {version} has no SingleTurnEnv "
            f"(it went with 0.4): {_INSTALL}",
            extra="verifiers",
            version=version,
        )
    return verifiers


def _load(vf: Any, environment_id: str, arguments: Mapping[str, Any]) -> Any:
    try:
        return vf.load_environment(environment_id, **arguments)
    except Exception as error:  # the environment's code; verifiers wraps the code's error in another error
        cause = error.__cause__ or error
        raise PluginError(
            "environment_not_loaded",
            f"verifiers environment '{environment_id}' cannot be loaded: {type(cause).__name__}: {cause}; is its "
            "package installed (prime env install, pip), and do dataset_args fit its load_environment?",
            environment=environment_id,
            error=type(cause).__name__,
        ) from error


def _check(vf: Any, environment_id: str, environment: Any) -> None:
    reason = found = None
    if not isinstance(environment, vf.SingleTurnEnv):
        found = type(environment).__name__
        reason = f"is a {found}, no vf.SingleTurnEnv: its turns would not be played"
    elif environment.tool_defs:
        found = "tools"
        reason = "gives the model tools, which nobody would answer"
    elif environment.message_type != "chat":
        found = environment.message_type
        reason = f"has message_type '{found}', and prompts here are chat messages"
    if reason is not None:
        raise PluginError(
            "environment_unsupported",
            f"verifiers environment '{environment_id}' {reason}; only one prompt and one reply can be run. Several "
            "turns are a class of your own: environment: {type: path/to/file.py:Class}",
            environment=environment_id,
            found=found,
        )


@contextmanager
def _own_signals() -> Iterator[None]:
    """Restores the handlers of SIGINT and SIGTERM, because a new environment replaces them with handlers that exit
    immediately."""
    held = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in held.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
