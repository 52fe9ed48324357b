"""What the user sees of the training: a progress bar on a terminal, one line a step elsewhere."""

from __future__ import annotations

import logging
import sys
from types import TracebackType

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gristmill.metrics import StepMetrics

_LOG = logging.getLogger(__name__)


class Display:
    """Shows steps as they come."""

    def __init__(self, total: int, done: int) -> None:
        self._progress: Progress | None = None
        self._total = total
        if sys.stderr.isatty():
            console = Console(stderr=True)
            # Log lines must go through the bar's console, or they tear it.
            logging.getLogger().handlers = [RichHandler(console=console, show_path=False)]
            self._progress = Progress(
                TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"),
                TimeElapsedColumn(), TimeRemainingColumn(), console=console,
            )  # fmt: skip
            self._task = self._progress.add_task("", total=total, completed=done)

    def step(self, metrics: StepMetrics) -> None:
        text = f"reward {metrics.reward_mean:.3f}  loss {metrics.loss:+.4f}"
        if self._progress is not None:
            self._progress.update(self._task, completed=metrics.step, description=text)
            return
        seconds = " ".join(f"{phase} {value:.2f}" for phase, value in metrics.seconds.items())
        _LOG.info(
            "step %d/%d  %s  grad_norm %.3f  logprob_diff %.1e  version %s  seconds: %s",
            metrics.step, self._total, text, metrics.grad_norm, metrics.rollout_logprob_diff_mean,
            metrics.policy_version, seconds,
        )  # fmt: skip

    def __enter__(self) -> Display:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()
