"""Samples of rollouts for users to read: a few completions as text, with their scores."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from gristmill import TrajectoryGroup
from gristmill_env.transcript import Attempt

COLUMNS = ("text", "score", "group", "version")
"""Per row: prompt and completion, the weighted total, the group's id, and the version of the weights."""

Row = tuple[str, float, str, str]


class Rollouts:
    """The latest rollouts since the last `take`."""

    def __init__(self, keep: int, per_group: int) -> None:
        """`keep`: rows in all. `per_group`: number of rows per group, from its first; -1: all."""
        self._rows: deque[Row] = deque(maxlen=keep)
        self._per_group = None if per_group < 0 else per_group

    def add(self, group: TrajectoryGroup, texts: Sequence[str]) -> None:
        """Keeps some sequences of a group. `texts`: one per sequence of the group."""
        for text, reward in list(zip(texts, group.rewards, strict=True))[: self._per_group]:
            self._rows.append((text, float(reward), group.group_id, str(group.oldest_version)))

    def take(self) -> list[Row]:
        """Returns the rows, oldest first, and clears them."""
        rows = list(self._rows)
        self._rows.clear()
        return rows


def in_words(attempt: Attempt) -> str:
    """Returns prompt and reply as the model saw and wrote them; for several turns, the conversation."""
    if attempt.replies == 1:
        return attempt.prompt.text.removesuffix(attempt.prompt.begun) + attempt.text
    return "\n".join(f"{message['role']}: {message['content']}" for message in attempt.messages)
