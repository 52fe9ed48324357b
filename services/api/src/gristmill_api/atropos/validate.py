"""Checks which fields of a group fit its tokens. Atropos' server does not check lengths.

A group whose masks or scores do not fit is refused, because no trainer could use it. An optional field that does not
fit is left out of the stored group: clients send such fields, and Atropos' server accepts them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gristmill_api.atropos.messages import ScoredData

BY_TOKEN: Final = ("tokens", "masks", "advantages", "ref_logprobs", "inference_logprobs")
"""Fields with one number per token."""
_OPTIONAL_BY_TOKEN: Final = BY_TOKEN[2:]
_DISTILLED: Final = ("distill_token_ids", "distill_logprobs")
_FREE: Final = ("messages", "generation_params", "overrides", "group_overrides", "images")
"""Fields that hold any JSON."""


class Mismatch(ValueError):
    """A required field does not fit. `where`: the path inside the group, such as ("masks", 3)."""

    def __init__(self, where: tuple[str | int, ...], message: str) -> None:
        super().__init__(message)
        self.where = where


@dataclass(frozen=True)
class Shape:
    """The lengths of everything in a group."""

    rows: Mapping[str, Sequence[int]]
    """Of the fields BY_TOKEN: entries per sequence. An optional field that is not there has none."""
    scores: int
    messages: int = 0
    overrides: int = 0
    distilled: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    """Of distill_token_ids and distill_logprobs: entries per token, by sequence."""


def misfits(shape: Shape) -> set[str]:
    """Names of the optional fields that do not fit the tokens. Raises Mismatch for tokens, masks or scores.

    An optional list may be empty: BaseEnv sends empty lists for fields that it does not have. `messages` and
    `overrides` may be shorter than the group: BaseEnv sends only those of some sequences.
    """
    lengths = list(shape.rows["tokens"])
    if not lengths:
        raise Mismatch(("tokens",), "a group needs at least one sequence")
    _same(("masks",), len(shape.rows["masks"]), len(lengths), "sequences")
    for index, (entries, wanted) in enumerate(zip(shape.rows["masks"], lengths, strict=True)):
        _same(("masks", index), entries, wanted, "tokens")
    _same(("scores",), shape.scores, len(lengths), "sequences")
    found = {name for name in _OPTIONAL_BY_TOKEN if list(shape.rows[name]) not in ([], lengths)}
    found |= {name for name in ("messages", "overrides") if getattr(shape, name) > len(lengths)}
    # The teacher's ids and log-probabilities have one list per token, of equal lengths in both, or none is of use.
    taught = {name: rows for name, rows in shape.distilled.items() if rows}
    if any(sizes(rows) != lengths or rows != next(iter(taught.values())) for rows in taught.values()):
        found |= set(taught)
    return found


def unsayable(group: ScoredData) -> set[str]:
    """Names of the optional fields that hold NaN, infinity or half of a surrogate pair, which JSON cannot hold although
    Python's parser accepts them. Raises Mismatch for scores."""
    if not _finite(group.scores):
        raise Mismatch(("scores",), "holds NaN or infinity")
    found = {name for name in _OPTIONAL_BY_TOKEN if not all(map(_finite, getattr(group, name) or ()))}
    if not all(_finite(position) for sequence in group.distill_logprobs or () for position in sequence):
        found |= {name for name in _DISTILLED if getattr(group, name) is not None}
    return found | {name for name in _FREE if not _is_json(getattr(group, name))}


def sizes(matrix: Sequence[Sequence[Any]] | None) -> list[int]:
    return [len(row) for row in matrix or ()]


def _same(where: tuple[str | int, ...], found: int, wanted: int, unit: str) -> None:
    if found != wanted:
        raise Mismatch(where, f"has {found} entries for {wanted} {unit}")


def _finite(values: Sequence[float]) -> bool:
    return all(map(math.isfinite, values))


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return False
    return True
