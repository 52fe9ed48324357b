"""Counts what `serve` has done: submitted and dropped rows, speed, and the remaining time."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable

from gristmill.logs import line
from gristmill_env.errors import DropReason, EnvError

logger = logging.getLogger(__name__)

_WINDOW = 48
_NEARLY_ALL = 0.9
_STEPS_OF_FAILURES = 10
_LEAST_FAILURES = 64


class Tally:
    """Groups submitted and dropped by this process."""

    def __init__(self) -> None:
        self.submitted = 0
        self.dropped: Counter[str] = Counter()
        self.unscored = 0
        """Completions excluded from their groups because a reward failed or no reward returned a value."""
        self.failed_rollouts = 0
        """Rollouts that failed after their retries and were left out of their groups."""
        self._recent: deque[DropReason | None] = deque(maxlen=_WINDOW)
        self._next_hint = _WINDOW
        self._last: dict[DropReason, str] = {}
        self._failed = 0
        """Rows that failed since the last row that did not."""
        self._first: dict[DropReason, str] = {}
        """The first error of each reason among these rows."""

    def add(self, reason: DropReason | None, why: str = "") -> None:
        """Counts a finished row: submitted (None) or dropped for `reason`. `why`: the row's error."""
        if reason is None:
            self.submitted += 1
        else:
            self.dropped[reason.value] += 1
            self._last[reason] = why
        self._count_failures(reason, why)
        self._recent.append(reason)
        if self._total >= self._next_hint:
            self._hint()

    def check(self, groups_per_step: int | None) -> None:
        """Raises EnvError, with the first error, if every row failed for ten steps' worth of rows, at least 64."""
        if self._failed < max(_LEAST_FAILURES, _STEPS_OF_FAILURES * (groups_per_step or 0)):
            return
        reasons = "; ".join(f"{reason.value}: {why or _HINTS[reason]}" for reason, why in self._first.items())
        raise EnvError(
            "every_row_fails",
            f"the last {self._failed} rows were all dropped, so that nothing is left to train on. The first errors: "
            f"{reasons}",
            rows=self._failed,
            reasons=[reason.value for reason in self._first],
        )

    def __str__(self) -> str:
        dropped = ", ".join(f"{count} {reason}" for reason, count in self.dropped.most_common())
        unscored = f", {self.unscored} completions left out of theirs" if self.unscored else ""
        failed = f", {self.failed_rollouts} rollouts failed and left out" if self.failed_rollouts else ""
        return f"{self.submitted} groups submitted, {dropped or 'none'} dropped{unscored}{failed}"

    @property
    def _total(self) -> int:
        return self.submitted + self.dropped.total()

    def _count_failures(self, reason: DropReason | None, why: str) -> None:
        if reason is None or reason is DropReason.SAME_SCORES:
            self._failed = 0
            self._first.clear()
        else:
            self._failed += 1
            self._first.setdefault(reason, why)

    def _hint(self) -> None:
        reason, count = Counter(self._recent).most_common(1)[0]
        if reason is None or count < _NEARLY_ALL * len(self._recent):
            return
        self._next_hint = self._total + _WINDOW
        last = f"; the last error: {self._last[reason]}" if self._last.get(reason) else ""
        hint = f"{_HINTS[reason]}{last}"
        logger.warning("%d of the last %d groups were dropped as %s: %s", count, _WINDOW, reason.value, hint)


_HINTS = {
    DropReason.SAME_SCORES: "the rewards do not distinguish completions, so there is nothing to learn from. Look at "
    "completions and scores with `try`; raise temperature or group_size, change how hard the task is, or take a finer "
    "reward",
    DropReason.TOO_LONG: "raise max_token_length",
    DropReason.PROMPT_REFUSED: "the model server refuses these prompts",
    DropReason.REWARD_ERROR: "a reward fails on their completions",
    DropReason.ENVIRONMENT_ERROR: "the environment fails on them",
    DropReason.TIMEOUT: "raise rollout_timeout, group_timeout or worker_timeout, or lower max_tokens",
    DropReason.NO_SCORE: "no reward says anything of these rows; accuracy needs an answer that is mathematics, "
    "exact_match any text",
    DropReason.BAD_ROW: "their rows make no prompt, or the chat template refuses it",
    DropReason.REFUSED: "the API does not accept them",
}


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
        logger.info(line("progress", **fields, **self._left(step, steps)))

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
