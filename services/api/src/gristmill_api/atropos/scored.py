"""A group's JSON text, checked at the speed of a scan and cut into the text that is stored.

What is stored is what GET /batch will send: the JSON of the group with all 14 keys, so that a batch is made by putting
texts one after the other. The big arrays travel from the request's bytes into that text untouched; they are decoded
once, to be checked, and forgotten.

Atropos reads laxly and always writes numbers of a field's own type. A request that needs it ("1" for 1, true, 1.0 for
an int, NaN, a wrong field) is `Irregular`: it takes the slow way through messages.py, which converts or refuses it as
Atropos would.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw

from gristmill_api.atropos import lengths
from gristmill_api.atropos.messages import KEYS, ScoredData


class Irregular(ValueError):
    """The fast way does not know what to make of this body. Nothing is said about whether it is wrong."""


@dataclass(frozen=True)
class Scored:
    """A group as it is stored, and what the queue must know of it."""

    text: bytes
    """JSON object with the keys `KEYS`, in that order."""
    sequences: int
    tokens: int
    """Of all sequences together."""
    env_id: int | None


class _Message(msgspec.Struct):
    """At least these two keys."""

    role: Raw
    content: Raw


_NULL = Raw(b"null")


class _Slices(msgspec.Struct):
    """Where in the body each value lies."""

    tokens: Raw
    masks: Raw
    scores: Raw
    advantages: Raw = _NULL
    ref_logprobs: Raw = _NULL
    messages: Raw = _NULL
    generation_params: Raw = _NULL
    inference_logprobs: Raw = _NULL
    overrides: Raw = _NULL
    group_overrides: Raw = _NULL
    images: Raw = _NULL
    env_id: Raw = _NULL
    distill_token_ids: Raw = _NULL
    distill_logprobs: Raw = _NULL


class _Decoded(msgspec.Struct):
    """The same, strictly typed. msgspec takes an integer where a float is wanted, and nothing else that it is not."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    advantages: list[list[float]] | None
    ref_logprobs: list[list[float]] | None
    messages: list[list[_Message]] | None
    generation_params: dict[str, Any] | None
    inference_logprobs: list[list[float]] | None
    overrides: list[dict[str, Any]] | None
    group_overrides: dict[str, Any] | None
    images: Any
    env_id: int | None
    distill_token_ids: list[list[list[int]]] | None
    distill_logprobs: list[list[list[float]]] | None


_ONE = msgspec.json.Decoder(_Slices)
_LIST = msgspec.json.Decoder(list[_Slices])
_FIELDS = {field.name: msgspec.json.Decoder(field.type) for field in msgspec.structs.fields(_Decoded)}
_HEADS = {key: (b"{" if index == 0 else b",") + f'"{key}":'.encode() for index, key in enumerate(KEYS)}


def _depth_1(values: Sequence[Any]) -> int:
    return len(values)


def _depth_2(values: Sequence[Any]) -> int:
    return sum(map(len, values))


def _depth_3(values: Sequence[Any]) -> int:
    return sum(map(_depth_2, values))


_FLOATS: dict[str, Callable[[Sequence[Any]], int]] = {
    "scores": _depth_1,
    "advantages": _depth_2,
    "ref_logprobs": _depth_2,
    "inference_logprobs": _depth_2,
    "distill_logprobs": _depth_3,
}
"""Fields of floats, with how many a field's value holds."""


def read_one(body: bytes) -> Scored:
    """The body of /scored_data. Raises Irregular, or lengths.Mismatch for a regular body whose parts do not agree."""
    return _read(_slices(_ONE, body))


def read_list(body: bytes) -> list[Scored]:
    """The body of /scored_data_list. Raises Irregular also for a Mismatch: the slow way tells which group it is in."""
    try:
        return [_read(slices) for slices in _slices(_LIST, body)]
    except lengths.Mismatch as error:
        raise Irregular(str(error)) from error


def from_message(group: ScoredData) -> Scored:
    """The slow way. Raises lengths.Mismatch."""
    lengths.check(group)
    lengths.check_finite(group)
    try:
        text = json.dumps(group.model_dump(), ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except ValueError as error:  # in a field of free form
        raise lengths.Mismatch(
            (), "is nothing that JSON can say: it holds NaN, infinity or half a character"
        ) from error
    return Scored(text, len(group.tokens), _depth_2(group.tokens), group.env_id)


def _slices(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    try:
        if not body.isascii():
            body.decode()  # strings are cut out unread, and what is stored must be UTF-8
        return decoder.decode(body)
    except (ValueError, RecursionError) as error:
        raise Irregular(str(error)) from error


def _read(slices: _Slices) -> Scored:
    pieces: list[bytes | Raw] = []
    values: dict[str, Any] = {}
    for key in KEYS:
        raw: Raw = getattr(slices, key)
        try:
            value = values[key] = _FIELDS[key].decode(raw)
        except (ValueError, RecursionError) as error:
            raise Irregular(f"{key}: {error}") from error
        pieces += (_HEADS[key], raw if value is None or key not in _FLOATS else _floats(raw, value, _FLOATS[key]))
    decoded = _Decoded(**values)
    lengths.check(decoded)
    pieces.append(b"}")
    return Scored(b"".join(pieces), len(decoded.tokens), _depth_2(decoded.tokens), decoded.env_id)


def _floats(raw: Raw, values: Sequence[Any], count: Callable[[Sequence[Any]], int]) -> bytes | Raw:
    """The text, unless a number in it is written without a point: a client would read that one as an int."""
    return raw if bytes(raw).count(b".") == count(values) else msgspec.json.encode(values)
