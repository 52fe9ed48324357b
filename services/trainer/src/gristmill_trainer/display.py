"""The user's view of the training: a progress bar or log lines."""

from __future__ import annotations

import logging
import sys

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gristmill.internal.logs import LineFormatter
from gristmill.internal.metrics import StepMetrics
from gristmill.internal.trouble import CODES

_LOG = logging.getLogger(__name__)


class Display:
    def __init__(self, total: int, done: int) -> None:
        self._progress: Progress | None = None
        self._total = total
        self._without_gradient = 0
        """Steps in which every group had equal scores."""
        if sys.stderr.isatty():
            console = Console(stderr=True)
            # Log lines must go through the bar's console; otherwise they damage the bar.
            handler = RichHandler(console=console, show_path=False)
            handler.setFormatter(LineFormatter("%(message)s"))
            logging.getLogger().handlers = [handler]
            self._progress = Progress(
                TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"),
                TimeElapsedColumn(), TimeRemainingColumn(), console=console,
            )  # fmt: skip
            self._task = self._progress.add_task("", total=total, completed=done)
            self._progress.start()

    def step(self, metrics: StepMetrics) -> None:
        text = f"reward {metrics.reward_mean:.3f}  loss {metrics.loss:+.4f}"
        if metrics.zero_advantage_share == 1:
            text += "  no gradient from rewards"
            self._warn_of_equal_scores(metrics.step)
        if self._progress is not None:
            self._progress.update(self._task, completed=metrics.step, description=text)
            return
        seconds = " ".join(f"{phase} {value:.2f}" for phase, value in metrics.seconds.items())
        _LOG.info(
            "step %d/%d  %s  grad_norm %.3f  logprob_diff %.1e  version %s  seconds: %s",
            metrics.step, self._total, text, metrics.grad_norm, metrics.rollout_logprob_diff_mean,
            metrics.policy_version, seconds,
        )  # fmt: skip

    def _warn_of_equal_scores(self, step: int) -> None:
        """Logs a warning at the first, second, fourth, eighth... such step."""
        self._without_gradient += 1
        if self._without_gradient.bit_count() != 1:
            return
        _LOG.warning(
            "step %d: in every group all completions scored the same, so rewards give no gradient (%d such steps so "
            "far) [scores_equal]: %s",
            step,
            self._without_gradient,
            CODES["scores_equal"].remedy,
        )

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
