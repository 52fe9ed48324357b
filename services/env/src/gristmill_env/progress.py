"""Counts what `serve` has done: submitted and dropped rows, speed, and the remaining time."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from gristmill.internal.logs import line
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
        self.by_source: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """`submitted` and `dropped` groups of each source, if the run has `sources`."""
        self._recent: deque[DropReason | None] = deque(maxlen=_WINDOW)
        self._next_hint = _WINDOW
        self._last: dict[DropReason, str] = {}
        self._failed: Counter[str | None] = Counter()
        """Rows of each source that failed since the source's last row that did not."""
        self._first: defaultdict[str | None, dict[DropReason, str]] = defaultdict(dict)
        """The first error of each reason among these rows."""

    def add(self, reason: DropReason | None, why: str = "", source: str | None = None) -> None:
        """Counts a finished row: submitted (None) or dropped for `reason`. `why`: the row's error. `source`: its name,
        if the run has `sources`."""
        if reason is None:
            self.submitted += 1
        else:
            self.dropped[reason.value] += 1
            self._last[reason] = why
        if source is not None:
            self.by_source[source]["submitted" if reason is None else "dropped"] += 1
        self._count_failures(reason, why, source)
        self._recent.append(reason)
        if self._total >= self._next_hint:
            self._hint()

    def check(self, groups_per_step: int | None) -> None:
        """Raises EnvError, with the first error, if every row of a source failed, for ten steps' worth of rows and at
        least 64."""
        limit = max(_LEAST_FAILURES, _STEPS_OF_FAILURES * (groups_per_step or 0))
        for source, failed in self._failed.items():
            if failed < limit:
                continue
            first = self._first[source]
            reasons = "; ".join(f"{reason.value}: {why or REASONS[reason].cause}" for reason, why in first.items())
            of = "" if source is None else f" of source '{source}'"
            raise EnvError(
                "every_row_fails",
                f"the last {failed} rows{of} were all dropped, so that nothing is left to train on. The first errors: "
                f"{reasons}",
                rows=failed,
                reasons=[reason.value for reason in first],
                **({} if source is None else {"source": source}),
            )

    def __str__(self) -> str:
        dropped = ", ".join(f"{count} {reason}" for reason, count in self.dropped.most_common())
        unscored = f", {self.unscored} completions left out of theirs" if self.unscored else ""
        failed = f", {self.failed_rollouts} rollouts failed and left out" if self.failed_rollouts else ""
        return f"{self.submitted} groups submitted, {dropped or 'none'} dropped{unscored}{failed}"

    @property
    def _total(self) -> int:
        return self.submitted + self.dropped.total()

    def _count_failures(self, reason: DropReason | None, why: str, source: str | None) -> None:
        if reason is None or reason is DropReason.SAME_SCORES:
            self._failed[source] = 0
            self._first[source].clear()
        else:
            self._failed[source] += 1
            self._first[source].setdefault(reason, why)

    def _hint(self) -> None:
        reason, count = Counter(self._recent).most_common(1)[0]
        if reason is None or count < _NEARLY_ALL * len(self._recent):
            return
        self._next_hint = self._total + _WINDOW
        last = f"; the last error: {self._last[reason]}" if self._last.get(reason) else ""
        hint = f"{REASONS[reason].cause}; {REASONS[reason].remedy}{last}"
        logger.warning("%d of the last %d groups were dropped as %s: %s", count, _WINDOW, reason.value, hint)


class Reason(NamedTuple):
    """The text of the log and docs/troubleshooting.md about a dropped row."""

    cause: str
    remedy: str


REASONS: Final[Mapping[DropReason, Reason]] = {
    DropReason.SAME_SCORES: Reason(
        "all completions of a group score the same, so the gradient is zero",
        "`try` shows completions and scores; raise `temperature` or `group_size`, change the difficulty, leave such "
        "rows out (`curriculum: true`), or use a finer reward",
    ),
    DropReason.TOO_LONG: Reason("the prompt leaves no room within `max_token_length`", "raise `max_token_length`"),
    DropReason.REWARD_ERROR: Reason(
        "rewards failed, and fewer than `min_rollouts` completions are left",
        "the page shows each group with its errors; the log shows the reward's first error with its traceback",
    ),
    DropReason.NO_SCORE: Reason(
        "rewards returned None, and fewer than `min_rollouts` completions are left",
        "`accuracy` needs an answer that is mathematics; `exact_match` takes any text",
    ),
    DropReason.ENVIRONMENT_ERROR: Reason(
        "your environment raised an error, or a call exceeded `step_timeout`, again after `rollout_retries`, and fewer "
        "than `min_rollouts` are left",
        "the page shows the error and the conversation of each group",
    ),
    DropReason.TIMEOUT: Reason(
        "a prompt exceeded `worker_timeout`; or rollouts exceeded `rollout_timeout` or `group_timeout`, or got no "
        "reply for `patience` seconds, and fewer than `min_rollouts` are left",
        "raise the limit, or lower `max_tokens`",
    ),
    DropReason.BAD_ROW: Reason(
        "a row has no text in `prompt_field` or `answer_field`, or a text with half a character, or `prompt_template` "
        "or the chat template fails on it",
        "`check` names the row and the field (docs/data.md, 'From a row to a prompt')",
    ),
    DropReason.PROMPT_REFUSED: Reason(
        "the model server refuses the prompt, and accepts others", "read the server's message in the log"
    ),
    DropReason.REFUSED: Reason("the API does not accept the group", "read the API's reason in the log"),
    DropReason.STALE: Reason(
        "the weights that sampled it are more than `max_staleness` steps old. The environment ends the generation of "
        "such a group",
        "raise `max_staleness`, or lower the number of workers",
    ),
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
