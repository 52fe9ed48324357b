"""What must agree inside a group. Atropos checks none of it; a batch that holds NaN fails there when it is drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol


class Values(Protocol):
    """A group's decoded values: scored.py's own, or a `ScoredData`."""

    @property
    def tokens(self) -> list[list[int]]: ...
    @property
    def masks(self) -> list[list[int]]: ...
    @property
    def scores(self) -> list[float]: ...
    @property
    def advantages(self) -> list[list[float]] | None: ...
    @property
    def ref_logprobs(self) -> list[list[float]] | None: ...
    @property
    def inference_logprobs(self) -> list[list[float]] | None: ...
    @property
    def messages(self) -> Sequence[Any] | None: ...
    @property
    def overrides(self) -> Sequence[Any] | None: ...
    @property
    def distill_token_ids(self) -> list[list[list[int]]] | None: ...
    @property
    def distill_logprobs(self) -> list[list[list[float]]] | None: ...


class Mismatch(ValueError):
    """`where`: the path to it inside the group, such as ("masks", 3)."""

    def __init__(self, where: tuple[str | int, ...], message: str) -> None:
        super().__init__(message)
        self.where = where


def check(group: Values) -> None:
    """Raises Mismatch for the first thing wrong. An optional list may be empty, as BaseEnv sends what it has not;
    `messages` and `overrides` may be shorter than the group, as BaseEnv sends what only some sequences have."""
    lengths = [len(sequence) for sequence in group.tokens]
    if not lengths:
        raise Mismatch(("tokens",), "a group needs at least one sequence")
    _same(("masks",), len(group.masks), len(lengths), "sequences")
    _same(("scores",), len(group.scores), len(lengths), "sequences")
    _each(("masks",), group.masks, lengths)
    for name in ("messages", "overrides"):
        found = len(getattr(group, name) or ())
        if found > len(lengths):
            raise Mismatch((name,), f"has {found} entries for {len(lengths)} sequences")
    for name in ("advantages", "ref_logprobs", "inference_logprobs", "distill_token_ids", "distill_logprobs"):
        values = getattr(group, name)
        if values:
            _same((name,), len(values), len(lengths), "sequences")
            _each((name,), values, lengths)
    if group.distill_token_ids and group.distill_logprobs:
        for index, (rows, wanted) in enumerate(zip(group.distill_logprobs, group.distill_token_ids, strict=True)):
            _each(("distill_logprobs", index), rows, [len(ids) for ids in wanted], "distill_token_ids")


def check_finite(group: Values) -> None:
    """Raises Mismatch for NaN and infinity. JSON has neither, but Python reads them from it and writes them into it."""
    _finite(("scores",), group.scores)
    for name in ("advantages", "ref_logprobs", "inference_logprobs"):
        for index, row in enumerate(getattr(group, name) or ()):
            _finite((name, index), row)
    for index, rows in enumerate(group.distill_logprobs or ()):
        for position, row in enumerate(rows):
            _finite(("distill_logprobs", index, position), row)


def _each(
    where: tuple[str | int, ...], rows: Sequence[Sequence[Any]], lengths: Sequence[int], unit: str = "tokens"
) -> None:
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        _same((*where, index), len(row), length, unit)


def _same(where: tuple[str | int, ...], found: int, wanted: int, unit: str) -> None:
    if found != wanted:
        raise Mismatch(where, f"has {found} entries for {wanted} {unit}")


def _finite(where: tuple[str | int, ...], values: Sequence[float]) -> None:
    if not all(map(math.isfinite, values)):
        raise Mismatch(where, "holds NaN or infinity")
