"""A function of the user's own, called after every step: to evaluate, to track elsewhere, to stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gristmill.errors import PluginError
from gristmill.metrics import StepMetrics
from gristmill.plugins import load_plugin


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
    """`path/to/file.py:function` or `package.module:function`. Raises PluginError."""
    hook = load_plugin(name, None)
    if not callable(hook):
        raise PluginError("not_a_function", f"on_step is '{name}', which is not a function", name=name)
    found: Hook = hook
    return found
