"""Checks a group's JSON text at the speed of a scan, and cuts out the text that is stored.

The stored text is what GET /batch sends: the JSON of the group with all 14 keys. So a batch is a concatenation of
texts. The large arrays are copied from the request's bytes into that text unchanged, and mostly without being parsed.

Atropos reads loosely and always writes numbers of the field's type. A request that needs a conversion ("1" for 1, true,
1.0 for an int, NaN, a wrong field) raises NeedsSlowPath. messages.py then converts or refuses the request as Atropos
would.

A group's arrays have 65,000 numbers each. To make Python objects of the numbers takes milliseconds, during which no
other request continues. A scan of the bytes takes a fraction of that time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Raw
from pydantic import TypeAdapter

from gristmill_api.atropos.messages import (
    BY_TOKEN,
    FREE,
    MOST_GROUPS,
    Groups,
    Mismatch,
    ScoredData,
    Shape,
    is_too_deep,
    misfits,
    sizes,
    unsayable,
)
from gristmill_api.conversion import KEYS
from gristmill_api.http.fast_route import NeedsSlowPath

T = TypeVar("T")
Row = npt.NDArray[np.uint8]
_BLANK = b" \t\r\n"
_COMMA, _POINT = ord(","), ord(".")


@dataclass(frozen=True)
class Scored:
    """A group as it is stored, and the facts that the queue needs."""

    text: bytes
    """JSON object with the keys `KEYS`, in that order."""
    sequences: int
    tokens: int
    """Of all sequences together."""
    env_id: int | None
    left_out: tuple[str, ...] = ()
    """Names of the optional fields that did not fit and are null in `text`."""


class _Message(msgspec.Struct):
    """At least these two keys."""

    role: Raw
    content: Raw


_NULL = Raw(b"null")


class _Slices(msgspec.Struct):
    """The bytes of each value in the body."""

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


_MODEL = TypeAdapter(ScoredData)
_MODELS = TypeAdapter(Groups)
_ONE = msgspec.json.Decoder(_Slices)
_LIST = msgspec.json.Decoder(list[_Slices])
# For the small fields. msgspec is strict: it accepts an int for a float, and no other conversion.
_TYPED: dict[str, msgspec.json.Decoder[Any]] = {
    "scores": msgspec.json.Decoder(list[float]),
    "messages": msgspec.json.Decoder(list[list[_Message]] | None),
    "generation_params": msgspec.json.Decoder(dict[str, Any] | None),
    "overrides": msgspec.json.Decoder(list[dict[str, Any]] | None),
    "group_overrides": msgspec.json.Decoder(dict[str, Any] | None),
    "images": msgspec.json.Decoder(Any),
    "env_id": msgspec.json.Decoder(int | None),
    "distill_token_ids": msgspec.json.Decoder(list[list[list[int]]] | None),
    "distill_logprobs": msgspec.json.Decoder(list[list[list[float]]] | None),
}
_FLOAT_ROWS = msgspec.json.Decoder(list[list[float]])
_WHOLE = ("tokens", "masks")
_HEADS = {key: (b"{" if index == 0 else b",") + f'"{key}":'.encode() for index, key in enumerate(KEYS)}


def read_one(body: bytes) -> Scored:
    """Reads the body of /scored_data. Raises NeedsSlowPath, and Mismatch if its parts do not agree."""
    return _read(_slices(_ONE, body))


def read_list(body: bytes) -> list[Scored]:
    """Reads the body of /scored_data_list. Raises NeedsSlowPath also for a Mismatch: FastAPI finds the index."""
    try:
        groups = [_read(slices) for slices in _slices(_LIST, body)]
    except Mismatch as error:
        raise NeedsSlowPath(str(error)) from error
    if len(groups) > MOST_GROUPS:
        raise NeedsSlowPath
    return groups


def from_message(group: ScoredData) -> Scored:
    """Returns the group of a message that FastAPI read. Raises Mismatch."""
    shape = Shape(
        rows={name: sizes(getattr(group, name)) for name in BY_TOKEN},
        scores=len(group.scores),
        messages=len(group.messages or ()),
        overrides=len(group.overrides or ()),
        distilled={
            "distill_token_ids": [sizes(rows) for rows in group.distill_token_ids or ()],
            "distill_logprobs": [sizes(rows) for rows in group.distill_logprobs or ()],
        },
    )
    left_out = misfits(shape) | unsayable(group)
    found = group.model_dump(exclude=left_out)  # pydantic refuses to dump what is nested too deep.
    values = {key: found.get(key) for key in KEYS}
    text = json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    return _scored(text, shape, group.env_id, left_out)


def read_one_slowly(body: bytes) -> Scored:
    """The slow path without FastAPI, which would block the event loop while it reads a large body.

    Raises NeedsSlowPath also for a wrong body: FastAPI reports the error as Atropos would.
    """
    return _slowly(lambda: from_message(_MODEL.validate_python(json.loads(body))))


def read_list_slowly(body: bytes) -> list[Scored]:
    """As read_one_slowly, of the body of /scored_data_list."""
    return _slowly(lambda: [from_message(message) for message in _MODELS.validate_python(json.loads(body))])


def _slowly(read: Callable[[], T]) -> T:
    try:
        return read()
    except (ValueError, RecursionError) as error:
        raise NeedsSlowPath(str(error)) from error


def _slices(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    try:
        if not body.isascii():
            body.decode()  # Strings are copied without being parsed, and the stored text must be UTF-8.
        return decoder.decode(body)
    except (ValueError, RecursionError) as error:
        raise NeedsSlowPath(str(error)) from error


def _read(slices: _Slices) -> Scored:
    texts = {key: bytes(getattr(slices, key)) for key in KEYS}
    rows: dict[str, list[int]] = {}
    for key in BY_TOKEN:
        rows[key], texts[key] = _rows(key, texts[key])
    values = {key: _decoded(decoder, key, texts[key]) for key, decoder in _TYPED.items()}
    texts["scores"] = msgspec.json.encode(values["scores"])
    if values["distill_logprobs"] is not None:
        texts["distill_logprobs"] = msgspec.json.encode(values["distill_logprobs"])
    shape = Shape(
        rows=rows,
        scores=len(values["scores"]),
        messages=len(values["messages"] or ()),
        overrides=len(values["overrides"] or ()),
        distilled={
            name: [sizes(positions) for positions in values[name] or ()]
            for name in ("distill_token_ids", "distill_logprobs")
        },
    )
    left_out = misfits(shape) | {key for key in FREE if is_too_deep(texts[key])}
    texts |= dict.fromkeys(left_out, b"null")
    text = b"".join([part for key in KEYS for part in (_HEADS[key], texts[key])] + [b"}"])
    return _scored(text, shape, values["env_id"], left_out)


def _rows(key: str, text: bytes) -> tuple[list[int], bytes]:
    """Returns the entries per row of a matrix, and its text with numbers of the field's type."""
    if text == b"null" and key not in _WHOLE:
        return [], text
    found = scan(text)
    if found is None or (key in _WHOLE and not found.whole):
        raise NeedsSlowPath(f"{key} is not a matrix of its type")
    if key in _WHOLE or found.pointed:
        return found.rows, text
    # A number without a point would be an int to a client in Python.
    return found.rows, msgspec.json.encode(_decoded(_FLOAT_ROWS, key, text))


def _decoded(decoder: msgspec.json.Decoder[Any], key: str, text: bytes) -> Any:
    try:
        return decoder.decode(text)
    except (ValueError, RecursionError) as error:
        raise NeedsSlowPath(f"{key}: {error}") from error


def _scored(text: bytes, shape: Shape, env_id: int | None, left_out: Collection[str]) -> Scored:
    lengths_of: Sequence[int] = shape.rows["tokens"]
    return Scored(text, len(lengths_of), sum(lengths_of), env_id, tuple(sorted(left_out)))


@dataclass(frozen=True)
class Matrix:
    rows: list[int]
    """Entries per row."""
    whole: bool
    """No number has a point or an exponent: all are ints."""
    pointed: bool
    """Every number has a point, and none an exponent that could overflow: all are finite floats."""


def scan(text: bytes) -> Matrix | None:
    """Scans valid JSON. Returns None for anything but an array of arrays of numbers."""
    text = text.strip(_BLANK)
    # Strings have quotes; objects, true, false and null have a byte beyond "e", which ends the bytes of numbers.
    if text[:1] != b"[" or b'"' in text or np.frombuffer(text, np.uint8).max() > ord("e"):
        return None
    rows: list[int] = []
    some_points, some_exponents = b"." in text, b"e" in text or b"E" in text
    pointed = True
    end = 0
    while (start := text.find(b"[", end + 1)) > 0:
        # One row after the other, nothing but a comma between them, and no array in a row.
        if text[end + 1 : start].strip(_BLANK) not in (b"", b","):
            return None
        end = text.find(b"]", start)
        if text.find(b"[", start + 1, end) > 0:
            return None
        # Row by row, so that the arrays of numpy stay in the processor's cache.
        row = np.frombuffer(text, np.uint8, end - start - 1, start + 1)
        rows.append(_count(row, _COMMA) + 1 if not _blank(text, start + 1, end) else 0)
        pointed = pointed and (_count(row, _POINT) if some_points else 0) == rows[-1]
        pointed = pointed and not (some_exponents and _may_overflow(row))
    return (
        Matrix(rows, not some_points and not some_exponents, pointed) if not text[end + 1 : -1].strip(_BLANK) else None
    )


def _count(row: Row, sign: int) -> int:
    return int(np.count_nonzero(row == sign))


def _may_overflow(row: Row) -> bool:
    """Returns whether an exponent in the row is not negative."""
    exponents = np.flatnonzero((row == ord("e")) | (row == ord("E")))
    return bool((row[exponents + 1] != ord("-")).any())


def _blank(text: bytes, start: int, end: int) -> bool:
    return not text[start : min(end, start + 64)].strip(_BLANK) and not text[start:end].strip(_BLANK)
