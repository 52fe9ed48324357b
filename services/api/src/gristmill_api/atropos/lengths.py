"""What must agree inside a group. Atropos checks none of it, and a batch that holds NaN fails when it is drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gristmill_api.atropos.messages import ScoredData

BY_TOKEN = ("tokens", "masks", "advantages", "ref_logprobs", "inference_logprobs")
"""Fields with a number a token."""
_DISTILLED = ("distill_token_ids", "distill_logprobs")


class Mismatch(ValueError):
    """`where`: the path to it inside the group, such as ("masks", 3)."""

    def __init__(self, where: tuple[str | int, ...], message: str) -> None:
        super().__init__(message)
        self.where = where


@dataclass(frozen=True)
class Shape:
    """How much a group holds of everything."""

    rows: Mapping[str, Sequence[int]]
    """Of the fields BY_TOKEN: entries a sequence. An optional field that is not there has none."""
    scores: int
    messages: int = 0
    overrides: int = 0
    distilled: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    """Of distill_token_ids and distill_logprobs: entries a position a sequence."""


def check(shape: Shape) -> None:
    """Raises Mismatch for the first thing wrong. An optional list may be empty, as BaseEnv sends what it has not;
    `messages` and `overrides` may be shorter than the group, as BaseEnv sends what only some sequences have."""
    lengths = shape.rows["tokens"]
    if not lengths:
        raise Mismatch(("tokens",), "a group needs at least one sequence")
    _same(("masks",), len(shape.rows["masks"]), len(lengths), "sequences")
    _same(("scores",), shape.scores, len(lengths), "sequences")
    for name, found in (("messages", shape.messages), ("overrides", shape.overrides)):
        if found > len(lengths):
            raise Mismatch((name,), f"has {found} entries for {len(lengths)} sequences")
    for name, rows in shape.rows.items():
        if rows:
            _each((name,), rows, lengths, "sequences", "tokens")
    for name in _DISTILLED:
        positions = [len(rows) for rows in shape.distilled.get(name, ())]
        if positions:
            _each((name,), positions, lengths, "sequences", "tokens")
    _side_by_side(shape.distilled)


def check_finite(group: ScoredData) -> None:
    """Raises Mismatch for NaN and infinity. JSON has neither, but Python reads them from it and writes them into it."""
    _finite(("scores",), group.scores)
    for name in ("advantages", "ref_logprobs", "inference_logprobs"):
        for index, row in enumerate(getattr(group, name) or ()):
            _finite((name, index), row)
    for index, rows in enumerate(group.distill_logprobs or ()):
        for position, row in enumerate(rows):
            _finite(("distill_logprobs", index, position), row)


def sizes(matrix: Sequence[Sequence[Any]] | None) -> list[int]:
    return [len(row) for row in matrix or ()]


def _side_by_side(distilled: Mapping[str, Sequence[Sequence[int]]]) -> None:
    """The teacher's ids and log-probabilities: as many of these as of those, at each position."""
    ids, logprobs = (distilled.get(name, ()) for name in _DISTILLED)
    if ids and logprobs:
        for index, (found, wanted) in enumerate(zip(logprobs, ids, strict=True)):
            _each(("distill_logprobs", index), found, wanted, "positions", "distill_token_ids")


def _each(where: tuple[str | int, ...], found: Sequence[int], wanted: Sequence[int], outer: str, inner: str) -> None:
    _same(where, len(found), len(wanted), outer)
    for index, (row, length) in enumerate(zip(found, wanted, strict=True)):
        _same((*where, index), row, length, inner)


def _same(where: tuple[str | int, ...], found: int, wanted: int, unit: str) -> None:
    if found != wanted:
        raise Mismatch(where, f"has {found} entries for {wanted} {unit}")


def _finite(where: tuple[str | int, ...], values: Sequence[float]) -> None:
    if not all(map(math.isfinite, values)):
        raise Mismatch(where, "holds NaN or infinity")
