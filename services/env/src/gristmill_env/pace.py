"""The speed of a run in this worker, and an estimate of the remaining time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from gristmill.logs import line

_LOG = logging.getLogger(__name__)
_EVERY = 10.0
"""Seconds between lines."""


class Pace:
    """Counts the submitted groups, and writes a log line every few seconds."""

    def __init__(self, run_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds."""
        self._run_id = run_id
        self._clock = clock
        self._began = self._told = clock()
        self._groups = 0
        self._tokens = 0
        self._first_step: int | None = None

    def group(self, tokens: int, step: int, steps: int | None) -> None:
        """Counts a submitted group with `tokens` sampled tokens.

        `step`: training steps done when the group's permit was given. `steps`: training steps in all; None if unknown.
        """
        if self._first_step is None:
            self._first_step = step
        self._groups += 1
        self._tokens += tokens
        now = self._clock()
        if now - self._told < _EVERY:
            return
        self._told = now
        seconds = now - self._began
        fields = {
            "run": self._run_id,
            "step": step if steps is None else f"{step}/{steps}",
            "groups": self._groups,
            "groups_per_second": self._groups / seconds,
            "tokens_per_second": round(self._tokens / seconds),
        }
        _LOG.info(line("progress", **fields, **self._left(step, steps)))

    def _left(self, step: int, steps: int | None) -> dict[str, str]:
        """Estimates the remaining time from the steps since the first group, so the trainer and all workers count."""
        assert self._first_step is not None
        if steps is None or step <= self._first_step:
            return {}
        a_step = (self._clock() - self._began) / (step - self._first_step)
        return {"left": duration(a_step * max(steps - step, 0))}


def duration(seconds: float) -> str:
    """ "8 s", "3 min", "1 h 20 min"."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
