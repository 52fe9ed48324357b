"""The values of a row: which of them are text, which of them a file of saved groups can hold, and copies of them."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from numbers import Real
from typing import Any

_HALF = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair. Python's str can hold it, but UTF-8, and so a tokenizer or a file, cannot."""
_EXACT = 2**53
"""Floats above this number skip whole numbers, so their digits are not the digits of the source."""
_INT64, _UINT64 = -(2**63), 2**64
_IMMUTABLE = frozenset({str, int, float, bool, bytes, complex, type(None)})


class NotTextError(Exception):
    """A value is not text and not a number."""


def text_of(value: object) -> str:
    """Returns a text as it is, and a finite number as a person writes it: "72" for 72.0.

    Raises NotTextError for all other values: None, NaN, infinity, booleans, dates, bytes, lists and mappings.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        try:
            return str(value)
        except ValueError as error:
            raise NotTextError(str(error)) from error
    if isinstance(value, float) and math.isfinite(value):
        return str(int(value)) if value.is_integer() and abs(value) < _EXACT else str(value)
    if isinstance(value, Decimal) and value.is_finite():
        return f"{value:f}" if value != value.to_integral_value() else f"{value.to_integral_value():f}"
    raise NotTextError(f"{value!r:.60} ({type(value).__name__})")


def half_characters(value: object, path: str = "") -> Iterator[str]:
    """Yields the path of each text in `value` that holds half a character: "messages.0.content"."""
    if isinstance(value, str):
        if not value.isascii() and _HALF.search(value):
            yield path
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if type(inner) is str and inner.isascii() and type(key) is str and key.isascii():
                continue  # nearly all of a message, and much faster
            name = whole(str(key))
            if name != str(key):
                yield f"{path}.{name}".lstrip(".")
            yield from half_characters(inner, f"{path}.{name}".lstrip("."))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from half_characters(inner, f"{path}.{number}".lstrip("."))


def whole(text: str) -> str:
    """Returns the text with U+FFFD in place of each half character, so that it can be stored and logged."""
    return text if text.isascii() else _HALF.sub("\ufffd", text)


def json_or_none(text: str) -> Any:
    """Returns the JSON value of a text; None if it is not JSON, or is nested more deeply than Python can read."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def message_of(error: BaseException) -> str:
    """Returns the text of an error of a user's code. The code's `__str__` may fail."""
    try:
        return whole(str(error))
    except Exception as unreadable:  # noqa: BLE001  the user's code
        return f"<its __str__ raised {type(unreadable).__name__}>"


def is_storable(value: Any) -> bool:
    """Returns whether JSON and msgpack can hold the value unchanged: no date, bytes, NaN or integer beyond 64 bits."""
    if value is None or isinstance(value, str | bool):
        return True
    if isinstance(value, int):
        return _INT64 <= value < _UINT64
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_storable(inner) for key, inner in value.items())
    return isinstance(value, list | tuple) and all(map(is_storable, value))


def finite(value: object) -> float | None:
    """Returns a finite number, or a truth value, as a float; None for all other values."""
    try:
        return float(value) if isinstance(value, Real) and math.isfinite(value) else None
    except OverflowError:
        return None


def plain(value: Any) -> Any:
    """Returns the number or truth value of an array or tensor without dimensions, such as a scalar of numpy."""
    return value.item() if hasattr(value, "item") and getattr(value, "shape", None) == () else value


def private(value: Any) -> Any:
    """Returns a copy, so that changes by a user's code stay its own. Texts and numbers are not copied.

    Returns an object that cannot be copied unchanged.
    """
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    if kind is list:
        return [item if type(item) in _IMMUTABLE else private(item) for item in value]
    if kind is dict:
        return {name: item if type(item) in _IMMUTABLE else private(item) for name, item in value.items()}
    if kind is tuple:
        return tuple(map(private, value))
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001  an object that does not support copies may raise any error
        return value
