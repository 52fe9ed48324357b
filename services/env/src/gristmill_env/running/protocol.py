"""The messages between a worker process and its owner, over the process's stdin and stdout.

Each message is its length (4 bytes, little-endian) and then its body. The owner sends an `Order` and then jobs. The
target defines the meaning of a job's bytes. The process answers `Ready` or `Broken` once, and `Done` or `Failed` to
each job, in order.
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
    """The task of a process, and the resources that it may use."""

    target: str
    """ "package.module:factory". The factory takes `settings`, warms up, and returns the function that runs a job, from
    bytes to bytes."""
    settings: bytes = b""
    cpu: float
    """Seconds of processor time that a job may take. The kernel kills the process after that."""
    wall: float
    """Elapsed seconds that a job may take. The owner kills the process after that."""
    memory: int | None = None
    """Limit of the address space, in bytes."""
    grown: int | None = None
    """Resident bytes above which the process asks to be replaced, because the caches of parsers only grow."""
    niceness: int = 0
    path: list[str] | None = None
    """The owner's sys.path, if the process uses it."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The process is warm."""


class Broken(msgspec.Struct, frozen=True, array_like=True, tag="broken"):
    """The process cannot do any job, and ends."""

    reason: str
    code: str | None
    """Code of the error that the target raised, if the error is a GristmillError."""
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
    """Code of the error that the job raised, if the error is a GristmillError."""
    values: dict[str, Any]


Report = Ready | Broken | Done | Failed

_encoder = msgspec.msgpack.Encoder()
_reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
_orders = msgspec.msgpack.Decoder(Order)


def framed(message: Order | Report | bytes) -> bytes:
    """Returns the bytes of a message with its length. The bytes of a job are sent unchanged."""
    body = message if isinstance(message, bytes) else _encoder.encode(message)
    return HEAD.pack(len(body)) + body


def error_code(error: BaseException) -> str | None:
    """Returns the code of a GristmillError; None for another error."""
    return error.code if isinstance(error, GristmillError) else None


def error_values(error: BaseException) -> dict[str, Any]:
    """Returns the values of a GristmillError, in types that a message can hold; for another error its type's name."""
    if not isinstance(error, GristmillError):
        return {"error": type(error).__name__}
    return {name: plain(value) for name, value in error.values.items()}


def plain(value: object) -> Any:
    """Converts a value of an error to types that a message can hold. Other objects become text."""
    if type(value) in _PLAIN or (type(value) is int and -_MOST <= value < _MOST):
        return value
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    return str(value)


def decode_order(body: bytes) -> Order:
    """Returns the `Order` that is encoded as msgpack in `body`."""
    return _orders.decode(body)


def decode_report(body: bytes) -> Report:
    """Returns the report that is encoded as msgpack in `body`."""
    return _reports.decode(body)
