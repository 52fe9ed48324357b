"""A stored group as JSON for people and dashboards: the same form for /v1's binary groups and Atropos' JSON.

A group may hold millions of tokens. An example shows the beginning of each sequence. `cut` and `lengths` report the
rest.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from gristmill import Example, TrajectoryGroup
from gristmill.group import MAX_DEPTH
from gristmill_api.conversion import NOT_TRAINED, env_name, is_json

MAX_TOKENS: Final = 16_384
"""Tokens that one example shows, of all its sequences together."""
MAX_SEQUENCES: Final = 256
"""Sequences that one example shows."""
MAX_CHARACTERS: Final = 65_536
"""Characters that one example shows of its messages."""
_TOO_DEEP: Final = "[... nested too deep]"


def example(group_id: str, stored: bytes) -> bytes:
    """The JSON of an Example, from a group's bytes as they are stored. Blocking: the work grows with the group.

    Raises GroupError for bytes that are not a group.
    """
    shown = _of_json(group_id, stored) if is_json(stored) else _of_binary(stored)
    return shown.model_dump_json().encode()


def _of_binary(body: bytes) -> Example:
    group = TrajectoryGroup.decode(body)
    lengths: list[int] = group.lengths[:MAX_SEQUENCES].tolist()
    ends = group.lengths[:MAX_SEQUENCES].cumsum().tolist()
    most = _most_tokens(len(lengths))
    spans = [slice(end - length, end - length + min(length, most)) for end, length in zip(ends, lengths, strict=True)]
    messages = _Text()
    return Example(
        group_id=group.group_id,
        env_id=group.env_id,
        sequences=group.size,
        lengths=lengths,
        rewards=group.rewards[:MAX_SEQUENCES].tolist(),
        reward_parts={name: values[:MAX_SEQUENCES] for name, values in group.reward_parts.items()},
        finish_reasons=group.finish_reasons[:MAX_SEQUENCES],
        version=str(group.oldest_version),
        tokens=[group.tokens[span].tolist() for span in spans],
        trained=[group.mask[span].tolist() for span in spans],
        messages=messages.beginning_of(group.messages),
        rollouts=None if group.rollouts is None else group.rollouts[:MAX_SEQUENCES].tolist(),
        cut=messages.cut or group.size > MAX_SEQUENCES or max(lengths, default=0) > most,
    )


class _Scored(msgspec.Struct):
    """A stored text of Atropos'. Rows stay bytes, so that a long one does not become a million Python objects."""

    tokens: list[msgspec.Raw]
    masks: list[msgspec.Raw]
    scores: list[float]
    messages: list[Any] | None
    env_id: int | None


_SCORED: Final = msgspec.json.Decoder(_Scored)
_ROW: Final = msgspec.json.Decoder(list[int])


def _of_json(group_id: str, text: bytes) -> Example:
    scored = _SCORED.decode(text)
    rows = [bytes(row) for row in scored.tokens[:MAX_SEQUENCES]]
    lengths = [row.count(b",") + 1 if row.strip(b"[] \t\r\n") else 0 for row in rows]
    most = _most_tokens(len(rows))
    masks = [_beginning(bytes(row), most) for row in scored.masks[:MAX_SEQUENCES]]
    messages = _Text()
    return Example(
        group_id=group_id,
        env_id=env_name(scored.env_id),
        sequences=len(scored.tokens),
        lengths=lengths,
        rewards=scored.scores[:MAX_SEQUENCES],
        reward_parts={},
        finish_reasons=[],
        version=None,
        tokens=[_beginning(row, most) for row in rows],
        trained=[[token != NOT_TRAINED for token in mask] for mask in masks],
        messages=messages.beginning_of(scored.messages),
        cut=messages.cut or len(scored.tokens) > MAX_SEQUENCES or max(lengths, default=0) > most,
    )


def _beginning(row: bytes, most: int) -> list[int]:
    """The first numbers of a JSON array of numbers."""
    head = row.split(b",", most)[:most]
    return _ROW.decode(b",".join(head).rstrip(b"] \t\r\n") + b"]")


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
