"""A stored group as JSON for people and dashboards.

A group may hold millions of tokens. An example shows the beginning of each sequence. `cut` and `lengths` report the
rest.
"""

from __future__ import annotations

from typing import Any, Final

from gristmill import Example, TrajectoryGroup
from gristmill.group_checks import MAX_DEPTH

MAX_TOKENS: Final = 16_384
"""Tokens that one example shows, of all its sequences together."""
MAX_SEQUENCES: Final = 256
"""Sequences that one example shows."""
MAX_CHARACTERS: Final = 65_536
"""Characters that one example shows of its messages."""
_TOO_DEEP: Final = "[... nested too deep]"


def example(stored: bytes) -> bytes:
    """The JSON of an Example, from a group's bytes as they are stored. Blocking: the work grows with the group.

    Raises GroupError for bytes that are not a group.
    """
    group = TrajectoryGroup.decode(stored)
    lengths: list[int] = group.lengths[:MAX_SEQUENCES].tolist()
    ends = group.lengths[:MAX_SEQUENCES].cumsum().tolist()
    most = _most_tokens(len(lengths))
    spans = [slice(end - length, end - length + min(length, most)) for end, length in zip(ends, lengths, strict=True)]
    messages = _Text()
    shown = Example(
        group_id=group.group_id,
        env_id=group.env_id,
        sequences=group.size,
        lengths=lengths,
        rewards=group.rewards[:MAX_SEQUENCES].tolist(),
        reward_parts={name: values[:MAX_SEQUENCES] for name, values in group.reward_parts.items()},
        finish_reasons=group.finish_reasons[:MAX_SEQUENCES],
        version=str(group.oldest_version) if group.oldest_version.incarnation else None,
        tokens=[group.tokens[span].tolist() for span in spans],
        trained=[group.mask[span].tolist() for span in spans],
        messages=messages.beginning_of(group.messages),
        rollouts=None if group.rollouts is None else group.rollouts[:MAX_SEQUENCES].tolist(),
        cut=messages.cut or group.size > MAX_SEQUENCES or max(lengths, default=0) > most,
    )
    return shown.model_dump_json().encode()


def _most_tokens(sequences: int) -> int:
    """Tokens shown of each sequence."""
    return MAX_TOKENS // max(1, sequences)


class _Text:
    """Copies the beginning of a JSON value: MAX_CHARACTERS characters of it."""

    def __init__(self) -> None:
        self._left = MAX_CHARACTERS
        self.cut = False

    def beginning_of(self, value: Any, depth: int = 1) -> Any:
        self._left -= 1
        if isinstance(value, str):
            return self._string(value)
        if isinstance(value, list | dict) and depth > MAX_DEPTH:  # Stored before the check of submitted groups.
            self.cut = True
            return _TOO_DEEP
        if isinstance(value, list):
            return [self.beginning_of(item, depth + 1) for item in value if self._has_room()]
        if isinstance(value, dict):
            return {
                self._string(key): self.beginning_of(item, depth + 1) for key, item in value.items() if self._has_room()
            }
        return value

    def _string(self, text: str) -> str:
        room, self._left = max(0, self._left), self._left - len(text)
        if len(text) <= room:
            return text
        self.cut = True
        return f"{text[:room]}[... {len(text) - room} characters cut]"

    def _has_room(self) -> bool:
        self.cut = self.cut or self._left <= 0
        return self._left > 0
