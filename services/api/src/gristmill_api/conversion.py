"""Converts between Atropos' JSON and the binary group of /v1, so each protocol can lease groups of the other.

Both directions convert while an answer is built. The store keeps a group as it was submitted.

Values that only one of the two forms has:

    masks                 the token's id where trained, -100 elsewhere   <->  the mask
    inference_logprobs    1.0 where not sampled                          <->  logprobs, 0 where not trained
    overrides (one a sequence), group_overrides                          <->  overrides = {"sequences", "group"}
    generation_params     temperature, top_p, max_tokens                 <->  sampling
    no inference_logprobs                                                <->  logprobs_known is False
    images, and the other keys of generation_params                      <->  meta
    distill_* of k that varies by position                                ->  padded with id -1 and log-probability 0
    distill_* of k > 1 times the same id, each of probability 1           ->  a position without a teacher
    policy version        JSON has none: stamped when the group was received
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from gristmill import GroupError, SamplingParams, TrajectoryGroup, VersionSpan
from gristmill.group import F32, I32, NO_LOGPROBS, Bool

NOT_TRAINED: Final = -100
NOT_SAMPLED: Final = 1.0
_PADDING: Final = -1


class _Scored(msgspec.Struct):
    """A stored text. The API checked the text when it arrived."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    advantages: list[list[float]] | None
    ref_logprobs: list[list[float]] | None
    messages: list[Any] | None
    generation_params: dict[str, Any] | None
    inference_logprobs: list[list[float]] | None
    overrides: list[dict[str, Any]] | None
    group_overrides: dict[str, Any] | None
    images: Any
    env_id: int | None
    distill_token_ids: list[list[list[int]]] | None
    distill_logprobs: list[list[list[float]]] | None


KEYS: Final = _Scored.__struct_fields__
"""The 14 keys of a group in a batch of Atropos. Every group has all of them, in this order."""
_DECODER = msgspec.json.Decoder(_Scored)


def is_json(payload: bytes) -> bool:
    """Returns whether a stored group is Atropos' JSON. Msgpack starts with another byte."""
    return payload[:1] == b"{"


async def as_json(payload: bytes) -> bytes:
    """Returns a stored group as Atropos' clients read it."""
    return payload if is_json(payload) else await asyncio.to_thread(_as_json, payload)


def _as_json(payload: bytes) -> bytes:
    return to_json(TrajectoryGroup.decode(payload))


def to_group(text: bytes, group_id: str, run_id: str, row: int, version: str) -> TrajectoryGroup:
    """Returns Atropos' JSON as a binary group. `version`: the weights that were served when the JSON arrived.

    Raises GroupError for a group that has no binary form: inference_logprobs that miss a trained token, token ids below
    zero, no trained token at all.
    """
    with _group_errors():
        return _group(_DECODER.decode(text), group_id, run_id, row, version)


def to_binary(text: bytes, group_id: str, run_id: str, version: str) -> bytes:
    """Returns the bytes of `to_group`, with the row that a group of Atropos has by its id, such as "a00000012"."""
    with _group_errors():
        return _group(_DECODER.decode(text), group_id, run_id, int(group_id[1:]), version).encode()


@contextlib.contextmanager
def _group_errors() -> Iterator[None]:
    """Converts every error to a GroupError. A group's values come from outside, so any error of the libraries that read
    them is an error of this group: a token id beyond 32 bits, half a surrogate pair, an integer beyond 64 bits in a
    message, an empty sequence, a value that is nested too deep."""
    try:
        yield
    except GroupError:
        raise
    except Exception as error:
        named = f"{type(error).__name__}: {error}".encode(errors="backslashreplace").decode()
        raise GroupError("no_binary_form", f"it has no binary form: {named}") from error


def _group(scored: _Scored, group_id: str, run_id: str, row: int, version: str) -> TrajectoryGroup:
    masks = [np.array(mask, np.int64) != NOT_TRAINED for mask in scored.masks]
    mask = np.concatenate(masks)
    logprobs = _optional(scored.inference_logprobs)
    lengths = np.array([len(tokens) for tokens in scored.tokens], np.int32)
    distill_ids, distill_logprobs = _teacher(scored)
    params = dict(scored.generation_params or {})
    return TrajectoryGroup(
        group_id=group_id,
        run_id=run_id,
        env_id=env_name(scored.env_id),
        row=row,
        lengths=lengths,
        tokens=np.concatenate([np.array(tokens, np.int32) for tokens in scored.tokens]),
        logprobs=np.zeros(len(mask), np.float32) if logprobs is None else np.where(mask, logprobs, np.float32(0)),
        mask=mask,
        rewards=np.array(scored.scores, np.float32),
        reward_parts={},
        finish_reasons=["stop"] * len(masks),
        sampling=_sampling(params, int(lengths.max())),
        versions=[[VersionSpan(version, 0, _completion(of_sequence))] for of_sequence in masks],
        advantages=_optional(scored.advantages),
        ref_logprobs=_optional(scored.ref_logprobs),
        distill_ids=distill_ids,
        distill_logprobs=distill_logprobs,
        overrides=_overrides(scored),
        messages=scored.messages or None,
        meta={
            "generation_params": scored.generation_params,
            "images": scored.images,
            **({NO_LOGPROBS: True} if logprobs is None else {}),
        },
    )


def to_json(group: TrajectoryGroup) -> bytes:
    """Returns a binary group as Atropos' JSON, with all 14 keys."""
    ends = np.cumsum(group.lengths)[:-1]

    def by_sequence(flat: npt.NDArray[Any] | None) -> list[Any] | None:
        return None if flat is None else [part.tolist() for part in np.split(flat, ends)]

    overrides = group.overrides or {}
    sampling = {
        "temperature": group.sampling.temperature,
        "top_p": group.sampling.top_p,
        "max_tokens": group.sampling.max_tokens,
    }
    values: dict[str, Any] = {
        **dict.fromkeys(KEYS),
        "tokens": by_sequence(group.tokens),
        "masks": by_sequence(np.where(group.mask, group.tokens, NOT_TRAINED)),
        "scores": group.rewards.tolist(),
        "advantages": by_sequence(group.advantages),
        "ref_logprobs": by_sequence(group.ref_logprobs),
        "messages": group.messages,
        "generation_params": group.meta.get("generation_params", sampling),
        "inference_logprobs": by_sequence(_sampled(group)),
        "overrides": overrides.get("sequences"),
        "group_overrides": overrides.get("group"),
        "images": group.meta.get("images"),
        "env_id": _number(group.env_id),
        "distill_token_ids": _unpadded(group.distill_ids, group.distill_ids, group),
        "distill_logprobs": _unpadded(group.distill_logprobs, group.distill_ids, group),
    }
    return msgspec.json.encode(values)


def _sampled(group: TrajectoryGroup) -> F32 | None:
    return np.where(group.mask, group.logprobs, np.float32(NOT_SAMPLED)) if group.logprobs_known else None


def _optional(rows: Sequence[Sequence[float]] | None) -> F32 | None:
    return np.concatenate([np.array(row, np.float32) for row in rows]) if rows else None


def _overrides(scored: _Scored) -> dict[str, Any] | None:
    found = {"sequences": scored.overrides or None, "group": scored.group_overrides or None}
    return {name: value for name, value in found.items() if value is not None} or None


def _sampling(params: dict[str, Any], longest: int) -> SamplingParams:
    """Returns the values of generation_params that have the names of OpenAI's API."""

    def number(name: str, default: float) -> float:
        value = params.get(name)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else default

    return SamplingParams(
        temperature=number("temperature", 1.0) or 1.0,
        top_p=number("top_p", 1.0),
        max_tokens=int(number("max_tokens", longest)),
    )


def _completion(mask: Bool) -> int:
    """Returns the number of tokens from the first trained token to the sequence's end."""
    return len(mask) - int(mask.argmax())


def _teacher(scored: _Scored) -> tuple[I32 | None, F32 | None]:
    """Returns token ids i32[N*K] and log-probabilities f32[N*K], where K is the length of the longest position. One may
    be missing; the trainer refuses such a group."""
    ids, logprobs = _positions(scored.distill_token_ids), _positions(scored.distill_logprobs)
    taught = [not _is_filler(*pair) for pair in zip(ids, logprobs, strict=True)] if ids and logprobs else None
    return _padded(ids, taught, _PADDING, np.int32), _padded(logprobs, taught, 0.0, np.float32)


_Row = TypeVar("_Row", list[int], list[float])


def _positions(rows: list[list[_Row]] | None) -> list[_Row]:
    return [position for sequence in rows or () for position in sequence]


def _is_filler(ids: list[int], logprobs: list[float]) -> bool:
    """Returns whether a position is a filler, such as [0] * k with [0.0] * k, which environments send for positions
    without a teacher. A token that is listed several times, each time with probability 1, is not a distribution."""
    return len(ids) > 1 and not any(logprobs) and len(set(ids)) == 1


def _padded(
    positions: Sequence[Sequence[float]], taught: Sequence[bool] | None, padding: float, dtype: type[Any]
) -> Any:
    if not positions:
        return None
    flat = np.full((len(positions), max(map(len, positions))), padding, dtype)
    for row, position, present in zip(flat, positions, taught or itertools.repeat(True), strict=False):
        if present:
            row[: len(position)] = position
    return flat.reshape(-1)


def _unpadded(values: F32 | I32 | None, ids: I32 | None, group: TrajectoryGroup) -> list[Any] | None:
    if values is None or ids is None:
        return None
    shape = (len(group.tokens), -1)
    there = ids.reshape(shape) != _PADDING
    rows = [row[found].tolist() for row, found in zip(values.reshape(shape), there, strict=True)]
    starts = np.concatenate(([0], np.cumsum(group.lengths)))
    return [rows[start:end] for start, end in itertools.pairwise(starts)]


def env_name(number: int | None) -> str:
    """Returns the name in /v1 of an environment of Atropos, by its number."""
    return "atropos" if number is None else f"atropos-{number}"


def _number(env_id: str) -> int | None:
    """Returns the number of an environment of Atropos, by its name in /v1."""
    name, _, number = env_id.partition("-")
    return int(number) if name == "atropos" and number.isdecimal() else None
