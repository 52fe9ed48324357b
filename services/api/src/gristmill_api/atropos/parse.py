"""Reads the groups in a body of /scored_data or /scored_data_list.

Atropos reads loosely: "1" is 1, true is 1, NaN is accepted. msgspec reads strictly, and ten times as fast. A body that
needs a conversion, or that is wrong, raises NeedsSlowPath. The models of messages.py then convert or refuse the body as
Atropos would.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec
from pydantic import TypeAdapter

from gristmill_api.atropos.conversion import KEYS, SubmittedGroup, convert
from gristmill_api.atropos.messages import MOST_GROUPS, Groups, Mismatch, Scored, ScoredData, misfits, unsayable
from gristmill_api.http.fast_route import NeedsSlowPath

T = TypeVar("T")
_ONE: Final = msgspec.json.Decoder(Scored)
_LIST: Final = msgspec.json.Decoder(list[Scored])
_MODEL = TypeAdapter(ScoredData)
_MODELS = TypeAdapter(Groups)


def read_one(body: bytes) -> SubmittedGroup:
    """Reads the body of /scored_data. Raises NeedsSlowPath, and Mismatch if its parts do not agree."""
    return _read(_decoded(_ONE, body))


def read_list(body: bytes) -> list[SubmittedGroup]:
    """Reads the body of /scored_data_list. Raises NeedsSlowPath also for a Mismatch: FastAPI finds the index."""
    groups = _decoded(_LIST, body)
    if len(groups) > MOST_GROUPS:
        raise NeedsSlowPath
    try:
        return [_read(group) for group in groups]
    except Mismatch as error:
        raise NeedsSlowPath(str(error)) from error


def from_message(message: ScoredData) -> SubmittedGroup:
    """Returns the group of a message that FastAPI read. Raises Mismatch."""
    group = Scored(**{key: getattr(message, key) for key in KEYS})
    return _without(group, misfits(group) | unsayable(group))


def read_one_slowly(body: bytes) -> SubmittedGroup:
    """The slow path without FastAPI, which would block the event loop while it reads a large body.

    Raises NeedsSlowPath also for a wrong body: FastAPI reports the error as Atropos would.
    """
    return _slowly(lambda: from_message(_MODEL.validate_python(json.loads(body))))


def read_list_slowly(body: bytes) -> list[SubmittedGroup]:
    """As read_one_slowly, of the body of /scored_data_list."""
    return _slowly(lambda: [from_message(message) for message in _MODELS.validate_python(json.loads(body))])


def _slowly(read: Callable[[], T]) -> T:
    try:
        return read()
    except (ValueError, RecursionError) as error:
        raise NeedsSlowPath(str(error)) from error


def _decoded(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except (ValueError, RecursionError) as error:
        raise NeedsSlowPath(str(error)) from error


def _read(group: Scored) -> SubmittedGroup:
    if not all("role" in message and "content" in message for one in group.messages or () for message in one):
        raise NeedsSlowPath("a message lacks its role or its content")
    return _without(group, misfits(group))


def _without(group: Scored, left_out: set[str]) -> SubmittedGroup:
    for name in left_out:
        setattr(group, name, None)
    return convert(group, left_out)
