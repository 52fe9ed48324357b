"""A function of the user's own, called after every step: to evaluate, to track elsewhere, to stop."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gristmill.metrics import StepMetrics
from gristmill_trainer.errors import TrainerError


@dataclass(frozen=True)
class StepEvent:
    """A step that is done."""

    run_id: str
    metrics: StepMetrics
    """Of the step; `metrics.policy_version` are the weights that it made."""
    model_urls: tuple[str, ...]
    """The model servers. In a run with max_staleness above 0 they may still serve the version before."""


Hook = Callable[[StepEvent], Any]
"""The trainer waits for it. What it raises ends the training; the step is as done as any."""


def load_hook(name: str) -> Hook:
    """`path/to/file.py:function` or `package.module:function`. Raises TrainerError."""
    place, _, attribute = name.rpartition(":")
    if not place:
        raise TrainerError(f"on_step is '{name}'; write path/to/file.py:function or package.module:function")
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (ImportError, OSError) as error:
        raise TrainerError(f"on_step is '{name}', but {place} cannot be imported: {error}") from error
    hook = getattr(module, attribute, None)
    if not callable(hook):
        raise TrainerError(f"on_step is '{name}', but {place} has no function '{attribute}'")
    found: Hook = hook
    return found


def _from_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"there is no file {path.absolute()}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
