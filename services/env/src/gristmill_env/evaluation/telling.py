"""An evaluation as a row of metrics at the trajectory API, for plots over the steps."""

from __future__ import annotations

from typing import Any

from gristmill_env.evaluation.results import Evaluated, metrics

SOURCE = "eval"
"""Evaluations of `serve`."""
SOURCE_BY_HAND = "evaluate"
"""Evaluations of the command. They may sample differently, and do not replace the evaluations of `serve`."""


def row(evaluated: Evaluated) -> dict[str, Any]:
    """Returns the values of the metrics row: the figures by name, and the settings behind them."""
    plan, summary = evaluated.plan, evaluated.summary
    return {
        **metrics(summary, plan.samples),
        "errors": {name: figures.errors for name, figures in summary.rewards.items()},
        "prompts": summary.asked,
        "prompts_skipped": sum(summary.skipped.values()),
        "samples": plan.samples,
        "temperature": plan.sampling.temperature,
        "seconds": evaluated.ended - evaluated.started,
        "versions": ",".join(summary.versions)[:256],
        "dataset": plan.dataset[:256],
    }
