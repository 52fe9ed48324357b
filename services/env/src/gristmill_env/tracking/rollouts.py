"""Rollouts to be read: a few completions, in words, with what they scored."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from gristmill import TrajectoryGroup
from gristmill_env.transcript import Attempt

COLUMNS = ("text", "score", "group", "version")
"""Of a row: prompt and completion, the weighted total, the group it belongs to, and the weights it is from."""

Row = tuple[str, float, str, str]


class Rollouts:
    """The latest rollouts since they were last taken."""

    def __init__(self, keep: int, per_group: int) -> None:
        """`keep`: rows in all. `per_group`: the first so many of a group; -1: all of them."""
        self._rows: deque[Row] = deque(maxlen=keep)
        self._per_group = None if per_group < 0 else per_group

    def add(self, group: TrajectoryGroup, texts: Sequence[str]) -> None:
        """Keep some of a group. `texts`: one a sequence of the group."""
        for text, reward in list(zip(texts, group.rewards, strict=True))[: self._per_group]:
            self._rows.append((text, float(reward), group.group_id, str(group.oldest_version)))

    def take(self) -> list[Row]:
        """The rows, oldest first, and begin anew."""
        rows = list(self._rows)
        self._rows.clear()
        return rows


def in_words(attempt: Attempt) -> str:
    """Prompt and reply as the model saw and said them; of several turns, the conversation."""
    if attempt.replies == 1:
        return attempt.prompt.text.removesuffix(attempt.prompt.begun) + attempt.text
    return "\n".join(f"{message['role']}: {message['content']}" for message in attempt.messages)
