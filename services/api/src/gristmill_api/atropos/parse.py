"""Reads the groups in a body of /scored_data or /scored_data_list.

Atropos reads loosely: "1" is 1, true is 1, NaN is accepted. msgspec reads strictly, and ten times as fast. A body that
needs a conversion, or that is wrong, raises NeedsSlowPath. The models of messages.py then convert or refuse the body as
Atropos would. Of a large body they report only the first wrong entry of each list, which may have millions.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from typing import Annotated, Any, Final, get_args, get_origin

import msgspec
from fastapi import HTTPException
from fastapi.exceptions import RequestValidationError
from pydantic import Field, TypeAdapter, create_model

from gristmill_api.atropos.conversion import KEYS, SubmittedGroup, convert
from gristmill_api.atropos.messages import MOST_GROUPS, Mismatch, Scored, ScoredData, misfits, unsayable
from gristmill_api.http.fast_route import NeedsSlowPath, checked


def _stopping(kind: Any) -> Any:
    """Returns a type whose lists stop at their first wrong entry."""
    inner = get_args(kind)
    if get_origin(kind) is list:
        return Annotated[list[_stopping(inner[0])], Field(fail_fast=True)]  # type: ignore[misc]
    return _stopping(inner[0]) | None if type(None) in inner else kind


_ONE: Final = msgspec.json.Decoder(Scored)
_LIST: Final = msgspec.json.Decoder(list[Scored])
_FIELDS: Any = {name: (_stopping(one.annotation), one.default) for name, one in ScoredData.model_fields.items()}
_LARGE: Any = create_model(ScoredData.__name__, __base__=ScoredData, **_FIELDS)
_LARGE_LIST: Any = Annotated[_stopping(list[_LARGE]), Field(max_length=MOST_GROUPS)]
_MODEL: Final = TypeAdapter[Any](_LARGE)
_MODELS: Final = TypeAdapter[Any](_LARGE_LIST)


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
    """The slow path of a large body, without FastAPI, which would block the event loop meanwhile.

    Raises the errors that FastAPI raises for a wrong body.
    """
    return read_messages([_valid(_MODEL, body)])[0]


def read_list_slowly(body: bytes) -> list[SubmittedGroup]:
    """As read_one_slowly, of the body of /scored_data_list."""
    return read_messages(_valid(_MODELS, body), in_list=True)


def read_messages(messages: Iterable[ScoredData], *, in_list: bool = False) -> list[SubmittedGroup]:
    """Returns the groups of messages. Raises RequestValidationError for a message whose parts do not agree."""
    groups = []
    for index, message in enumerate(messages):
        try:
            groups.append(from_message(message))
        except Mismatch as error:
            raise invalid(error, *((index,) if in_list else ())) from error
    return groups


def invalid(mismatch: Mismatch, *at: int) -> RequestValidationError:
    """Returns the error that FastAPI would raise. `at`: the index of the group in a list."""
    problem = {"type": "value_error", "loc": ("body", *at, *mismatch.where), "msg": f"Value error, {mismatch}"}
    return RequestValidationError([problem])


def _valid(adapter: TypeAdapter[Any], body: bytes) -> Any:
    try:
        value = json.loads(body, parse_int=_int, parse_float=_float)
    except json.JSONDecodeError as error:
        problem = {"type": "json_invalid", "loc": ("body", error.pos), "msg": "JSON decode error", "input": {}}
        raise RequestValidationError([{**problem, "ctx": {"error": error.msg}}]) from error
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, "There was an error parsing the body") from error
    return checked(functools.partial(adapter.validate_python, from_attributes=True), value, "body")


# Without functions of Python, json.loads would keep the event loop's thread waiting until it has read the whole body.
def _int(digits: str) -> int:
    return int(digits)


def _float(digits: str) -> float:
    return float(digits)


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
