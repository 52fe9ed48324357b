"""What the owner of a worker process and the process send each other over its stdin and stdout.

Each message is its length (4 bytes, little-endian) and then its body. The owner sends an `Order` and then jobs, whose
bytes mean what the target says. The process answers `Ready` or `Broken` once, and `Done` or `Failed` to each job, in
order.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import msgspec

from gristmill import GristmillError

HEAD = struct.Struct("<I")

_PLAIN = frozenset({type(None), bool, float, str})
_MOST = 1 << 63
"""Integers from here on do not fit into a message."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What a process is for, and what it may use."""

    target: str
    """ "package.module:factory". The factory takes `settings`, warms up, and returns the function of a job: bytes to
    bytes."""
    settings: bytes = b""
    cpu: float
    """Seconds of processor time that a job may take. The kernel ends the process after that."""
    wall: float
    """Seconds in all that a job may take. The owner ends the process after that."""
    memory: int | None = None
    """Bytes of address space."""
    grown: int | None = None
    """Resident bytes at which the process asks to be replaced: parsers' caches only grow."""
    niceness: int = 0
    path: list[str] | None = None
    """sys.path, if it is to be the owner's."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The process is warm."""


class Broken(msgspec.Struct, frozen=True, array_like=True, tag="broken"):
    """The process cannot work at all, and ends."""

    reason: str
    code: str | None
    """Of the error that the target raised, if it was one of Gristmill's."""
    values: dict[str, Any]


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """The result of one job."""

    result: bytes
    last: bool = False
    """The process has grown too large and ends now."""


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The job raised; the process continues."""

    reason: str
    code: str | None
    """Of the error that the job raised, if it was one of Gristmill's."""
    values: dict[str, Any]


Report = Ready | Broken | Done | Failed

_encoder = msgspec.msgpack.Encoder()
_reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
_orders = msgspec.msgpack.Decoder(Order)


def framed(message: Order | Report | bytes) -> bytes:
    """The message as it goes over the pipe. A job is sent as it is."""
    body = message if isinstance(message, bytes) else _encoder.encode(message)
    return HEAD.pack(len(body)) + body


def error_code(error: BaseException) -> str | None:
    """Returns the code of one of Gristmill's errors; None for another error."""
    return error.code if isinstance(error, GristmillError) else None


def error_values(error: BaseException) -> dict[str, Any]:
    """Returns the values of one of Gristmill's errors, in types that a message can hold; of another error its type."""
    if not isinstance(error, GristmillError):
        return {"error": type(error).__name__}
    return {name: plain(value) for name, value in error.values.items()}


def plain(value: object) -> Any:
    """Returns a value of an error in types that a message can hold; another object as its text."""
    if type(value) in _PLAIN or (type(value) is int and -_MOST <= value < _MOST):
        return value
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    return str(value)


def decode_order(body: bytes) -> Order:
    """An `Order` from its msgpack."""
    return _orders.decode(body)


def decode_report(body: bytes) -> Report:
    """What a process says, from its msgpack."""
    return _reports.decode(body)
