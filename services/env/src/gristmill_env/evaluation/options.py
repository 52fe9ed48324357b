"""Flags of `evaluate`. The run's settings (dataset.eval_*) define the evaluation, so that serve measures the same."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from gristmill.settings import Settings


class EvaluateOptions(Settings):
    """Flags of `evaluate`."""

    out: Path | None = None
    """Folder for the results. Unset: a new one, named by the time, in the run's evaluations/."""

    resume: bool = False
    """Go on with the unfinished evaluation in --out, or else the latest of the run: only what is missing is done."""

    compare: list[Path] = Field(default_factory=list, max_length=2)
    """Folders of evaluations. One: evaluate, then compare with it. Two: compare them, and evaluate nothing."""
