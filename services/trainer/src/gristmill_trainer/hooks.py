"""Functions of the user that the trainer calls: after every step, for example to evaluate or to stop, and as a loss."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gristmill.deployment import Deployment
from gristmill.errors import PluginError
from gristmill.internal.metrics import StepMetrics
from gristmill.internal.plugins import load_plugin


@dataclass(frozen=True)
class StepEvent:
    """A finished step."""

    run_id: str
    metrics: StepMetrics
    """Metrics of the step; `metrics.policy_version` is the version of its new weights."""
    model_urls: tuple[str, ...]
    """URLs of the model servers. In a run with max_staleness above 0 they may still serve the previous version."""


Hook = Callable[[StepEvent], Any]
"""The trainer waits for the hook. An exception of the hook ends the training. The next start
repeats the steps after the last checkpoint."""


def load_function(name: str, setting: str) -> Callable[..., Any]:
    """Loads `path/to/file.py:function` or `package.module:function`, the value of `setting`. Raises PluginError.

    Searches a relative path first in the folder of trainer.yaml, then in the working directory.
    """
    found = load_plugin(name, Deployment.read(os.environ).config_dir)
    if not callable(found):
        raise PluginError("not_a_function", f"{setting} is '{name}', which is not a function", name=name)
    function: Callable[..., Any] = found
    return function
