"""Counts submitted and dropped rows, and logs a hint when nearly all rows are dropped."""

from __future__ import annotations

import logging
from collections import Counter, deque

from gristmill_env.drops import DropReason

logger = logging.getLogger(__name__)

_WINDOW = 48
_NEARLY_ALL = 0.9


class Tally:
    """Groups submitted and dropped by this process."""

    def __init__(self) -> None:
        self.submitted = 0
        self.dropped: Counter[str] = Counter()
        self.unscored = 0
        """Completions excluded from their groups because a reward failed or no reward returned a value."""
        self._recent: deque[DropReason | None] = deque(maxlen=_WINDOW)
        self._next_hint = _WINDOW

    def add(self, reason: DropReason | None) -> None:
        """Counts a finished row: submitted (None) or dropped for `reason`."""
        if reason is None:
            self.submitted += 1
        else:
            self.dropped[reason.value] += 1
        self._recent.append(reason)
        if self._total >= self._next_hint:
            self._hint()

    def __str__(self) -> str:
        dropped = ", ".join(f"{count} {reason}" for reason, count in self.dropped.most_common())
        unscored = f", {self.unscored} completions left out of theirs" if self.unscored else ""
        return f"{self.submitted} groups submitted, {dropped or 'none'} dropped{unscored}"

    @property
    def _total(self) -> int:
        return self.submitted + self.dropped.total()

    def _hint(self) -> None:
        reason, count = Counter(self._recent).most_common(1)[0]
        if reason is None or count < _NEARLY_ALL * len(self._recent):
            return
        self._next_hint = self._total + _WINDOW
        logger.warning("%d of the last %d groups were dropped as %s: %s", count, _WINDOW, reason.value, _HINTS[reason])


_HINTS = {
    DropReason.SAME_SCORES: "the rewards tell nothing apart, so there is nothing to learn from. Look at "
    "completions and scores with `try`; raise temperature or group_size, change how hard the task is, or take a finer "
    "reward",
    DropReason.TOO_LONG: "raise max_token_length",
    DropReason.PROMPT_REFUSED: "see the model server's words above",
    DropReason.REWARD_ERROR: "see the reward's error above",
    DropReason.ENVIRONMENT_ERROR: "see the environment's error above",
    DropReason.TIMEOUT: "raise timeout of server_configs or worker_timeout, or lower max_tokens",
    DropReason.NO_SCORE: "no reward says anything of these rows; accuracy needs an answer that is mathematics, "
    "exact_match any text",
    DropReason.BAD_ROW: "check prompt_field and answer_field",
    DropReason.REFUSED: "see the API's reason above",
}
