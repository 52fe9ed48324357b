"""A worker process (`python -m gristmill_env.running.child`), and its messages.

Each message is its length (4 bytes, little-endian) and then its body. The owner writes an `Order` and then jobs to the
process's stdin. The target of the order defines the meaning of a job's bytes. The process writes reports to its stdout:
`Ready` or `Failed` at the start, then `Done` or `Failed` for each job, in order. The process ends when stdin closes.

Jobs run on the main thread, so that code which uses signals works. The kernel kills the process when a job uses up its
processor time. If no owner kills an overdue process, the kernel kills it after twice the elapsed-time limit.
"""

from __future__ import annotations

import importlib
import os
import resource
import signal
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import msgspec

from gristmill import GristmillError
from gristmill_env.values import whole

HEAD = struct.Struct("<I")
"""The length of a message."""

_REASON = 300
"""Most characters of an error's text in a message."""
_PLAIN = frozenset({type(None), bool, float})
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


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """The result of one job."""

    result: bytes
    last: bool = False
    """The process has grown too large and ends now."""


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The job raised, and the process continues. As the first report: the process cannot do any job, and ends."""

    reason: str
    code: str | None
    """Code of the error, if the error is a GristmillError."""
    values: dict[str, Any]

    @classmethod
    def by(cls, error: Exception) -> Failed:
        """Returns the report of an error that the target raised."""
        reason = whole(f"{type(error).__name__}: {error}"[:_REASON])
        if not isinstance(error, GristmillError):
            return cls(reason, None, {"error": type(error).__name__})
        return cls(reason, error.code, {name: plain(value) for name, value in error.values.items()})


Report = Ready | Done | Failed

_encoder = msgspec.msgpack.Encoder()
_reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
_orders = msgspec.msgpack.Decoder(Order)


def framed(message: Order | Report | bytes) -> bytes:
    """Returns the bytes of a message with its length. The bytes of a job are sent unchanged."""
    body = message if isinstance(message, bytes) else _encoder.encode(message)
    return HEAD.pack(len(body)) + body


def plain(value: object) -> Any:
    """Converts a value of an error to types that a message can hold. Other objects become text.

    Half characters in text are replaced.
    """
    if isinstance(value, str):
        return whole(value)
    if type(value) in _PLAIN or (type(value) is int and -_MOST <= value < _MOST):
        return value
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {whole(str(name)): plain(item) for name, item in value.items()}
    return whole(str(value))


def decode_order(body: bytes) -> Order:
    """Returns the `Order` that is encoded as msgpack in `body`."""
    return _orders.decode(body)


def decode_report(body: bytes) -> Report:
    """Returns the report that is encoded as msgpack in `body`."""
    return _reports.decode(body)


def main() -> None:
    jobs, reports = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output that a library prints must not mix with the reports
    sys.stdin = Path(os.devnull).open()  # noqa: SIM115  for as long as the process runs
    order = decode_order(_next(jobs) or b"")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool's owner handles Ctrl-C
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the kernel kills the process without running Python code
    os.nice(order.niceness)
    if order.memory:
        resource.setrlimit(resource.RLIMIT_AS, (order.memory, order.memory))
    if order.path is not None:
        sys.path[:] = order.path
    module, _, factory = order.target.partition(":")
    try:
        work = getattr(importlib.import_module(module), factory)(order.settings)
    except Exception as error:  # noqa: BLE001  the owner tells it to whoever asks
        _say(reports, Failed.by(error))
        return
    _say(reports, Ready())
    last = False
    while not last and (job := _next(jobs)) is not None:
        signal.setitimer(signal.ITIMER_PROF, order.cpu)
        signal.setitimer(signal.ITIMER_REAL, 2 * order.wall)  # in case the owner no longer watches
        try:
            report: Report = Done(work(job), last := order.grown is not None and _resident() > order.grown)
        except Exception as error:  # noqa: BLE001  what it raises belongs to this job
            report = Failed.by(error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _say(reports, report)


def _resident() -> int:
    """Returns the bytes in memory now. Does not use ru_maxrss, because exec preserves the parent's value, which may
    be a large worker's."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except FileNotFoundError:  # not Linux: the memory limit ends the process in time
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _next(jobs: IO[bytes]) -> bytes | None:
    """Returns the next message; None when the owner has closed the pipe or has exited."""
    head = jobs.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    (size,) = HEAD.unpack(head)
    body = jobs.read(size)
    return body if len(body) == size else None


def _say(reports: IO[bytes], report: Report) -> None:
    reports.write(framed(report))
    reports.flush()


if __name__ == "__main__":
    main()
