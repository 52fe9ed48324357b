"""The bodies of Atropos' requests, read as loosely as its own server reads them: "1" is 1, unknown keys are ignored.

FastAPI reports a body that does not fit with Atropos' 422 `{"detail": [...]}`, word for word. parse.py reads groups
first, as `Scored`. ScoredData reads a group only if parse.py raises NeedsSlowPath.

Atropos' server does not check lengths. Here a group whose masks or scores do not fit its tokens is refused, because no
trainer could use it. An optional field that does not fit is left out of the stored group: clients send such fields, and
Atropos' server accepts them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from pydantic import BaseModel, Field, field_validator

from gristmill.group_checks import MAX_DEPTH, is_deeper

Weight = Annotated[float, Field(ge=-1e6, le=1e6)]
"""Within bounds, so that no sum or product of the status of another environment is infinite."""
Word = Annotated[str, Field(max_length=4096)]


MOST_SEQUENCES: Final = 65_536
"""In a group, and in a batch. Scripts loop over them while all other calls wait."""
Number = Annotated[int, Field(ge=-(2**53), le=2**53)]
"""What JSON, Lua and Redis hold exactly, also after additions."""

MOST_GROUPS: Final = 1024
"""In one request: one call of a script stores them, and other calls wait for it."""


class Registration(BaseModel):
    """The registration of a trainer."""

    wandb_group: Word
    wandb_project: Word
    batch_size: Annotated[Number, Field(le=MOST_SEQUENCES)]
    """Sequences a batch, exactly. A trainer that registers less than 1 gets no batches."""
    max_token_len: Number
    checkpoint_dir: Word
    save_checkpoint_interval: Number
    starting_step: Number
    num_steps: Number


class RegisterEnv(BaseModel):
    max_token_length: Number
    desired_name: Word
    weight: Weight
    group_size: Annotated[int, Field(ge=1, le=MOST_SEQUENCES)]
    min_batch_allocation: Weight | None = None
    """Share of every batch that must come from this environment."""


class EnvIdentifier(BaseModel):
    env_id: Number


class ScoredData(BaseModel):
    """One group: G sequences with their scores.

    Fields by sequence have G entries. Fields by token have one entry per token.
    """

    tokens: list[list[int]]
    masks: list[list[int]]
    """By token: the token's id if it is trained on, otherwise -100."""
    scores: list[float]
    advantages: list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    messages: list[list[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] | None = None
    inference_logprobs: list[list[float]] | None = None
    """By token: 1.0, which no log-probability is, if the token was not sampled."""
    overrides: list[dict[Any, Any]] | None = None
    group_overrides: dict[Any, Any] | None = None
    images: Any | None = None
    env_id: int | None = None
    distill_token_ids: list[list[list[int]]] | None = None
    distill_logprobs: list[list[list[float]]] | None = None

    @field_validator("messages", mode="before")
    @classmethod
    def _role_and_content(cls, messages: Any) -> Any:
        for conversation in messages if isinstance(messages, list) else ():
            if not isinstance(conversation, list):
                return messages  # the type check that follows says it better
            for message in conversation:
                if isinstance(message, dict | str) and not ("role" in message and "content" in message):
                    raise ValueError("Message must have 'role' and 'content' fields")
        return messages


Groups = Annotated[list[ScoredData], Field(max_length=MOST_GROUPS)]


class Scored(msgspec.Struct):
    """The values of a group. msgspec is strict: it accepts an int for a float, and no other conversion."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    advantages: list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    messages: list[list[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] | None = None
    inference_logprobs: list[list[float]] | None = None
    overrides: list[dict[str, Any]] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any = None
    env_id: int | None = None
    distill_token_ids: list[list[list[int]]] | None = None
    distill_logprobs: list[list[list[float]]] | None = None


_OPTIONAL_BY_TOKEN: Final = ("advantages", "ref_logprobs", "inference_logprobs")
"""Fields with one number per token."""
_DISTILLED: Final = ("distill_token_ids", "distill_logprobs")
FREE: Final = ("messages", "generation_params", "overrides", "group_overrides", "images")
"""Fields that hold any JSON."""


class Mismatch(ValueError):
    """A required field does not fit. `where`: the path inside the group, such as ("masks", 3)."""

    def __init__(self, where: tuple[str | int, ...], message: str) -> None:
        super().__init__(message)
        self.where = where


def misfits(group: Scored) -> set[str]:
    """Names of the optional fields that do not fit the tokens. Raises Mismatch for tokens, masks or scores.

    An optional list may be empty: BaseEnv sends empty lists for fields that it does not have. `messages` and
    `overrides` may be shorter than the group: BaseEnv sends them for some sequences only.
    """
    lengths = _sizes(group.tokens)
    if not lengths:
        raise Mismatch(("tokens",), "a group needs at least one sequence")
    if 0 in lengths:
        raise Mismatch(("tokens", lengths.index(0)), "a sequence needs at least one token")
    _check_same(("masks",), len(group.masks), len(lengths), "sequences")
    for index, (mask, wanted) in enumerate(zip(group.masks, lengths, strict=True)):
        _check_same(("masks", index), len(mask), wanted, "tokens")
    _check_same(("scores",), len(group.scores), len(lengths), "sequences")
    names = {name for name in _OPTIONAL_BY_TOKEN if _sizes(getattr(group, name)) not in ([], lengths)}
    names |= {name for name in ("messages", "overrides") if len(getattr(group, name) or ()) > len(lengths)}
    # The teacher's ids and log-probabilities have one list per token, of equal lengths in both, or none is of use.
    taught = {name: [_sizes(rows) for rows in getattr(group, name) or ()] for name in _DISTILLED}
    taught = {name: rows for name, rows in taught.items() if rows}
    if any(_sizes(rows) != lengths or rows != next(iter(taught.values())) for rows in taught.values()):
        names |= set(taught)
    return names | {name for name in FREE if is_deeper(getattr(group, name), MAX_DEPTH)}


def unsayable(group: Scored) -> set[str]:
    """Names of the optional fields that hold NaN, infinity or half of a surrogate pair, which JSON cannot hold although
    Python's parser accepts them. Raises Mismatch for scores."""
    if not _finite(group.scores):
        raise Mismatch(("scores",), "holds NaN or infinity")
    names = {name for name in _OPTIONAL_BY_TOKEN if not all(map(_finite, getattr(group, name) or ()))}
    if not all(_finite(position) for sequence in group.distill_logprobs or () for position in sequence):
        names |= {name for name in _DISTILLED if getattr(group, name) is not None}
    return names | {name for name in FREE if not _is_json(getattr(group, name))}


def _sizes(matrix: Sequence[Sequence[Any]] | None) -> list[int]:
    return [len(row) for row in matrix or ()]


def _check_same(where: tuple[str | int, ...], found: int, wanted: int, unit: str) -> None:
    if found != wanted:
        raise Mismatch(where, f"has {found} entries for {wanted} {unit}")


def _finite(values: Sequence[float]) -> bool:
    return all(map(math.isfinite, values))


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return False
    return True
