"""The process in which a user's code runs (`python -m gristmill_env.running.host`), and its messages.

A message is its length (4 bytes, little-endian) and a body in msgpack. The owner (`code_process.CodeProcess`) writes
`Start` to the process's stdin, and the process writes `Ready` or `Failed` to its stdout. Then the owner writes calls,
which run at the same time: `async` code on one event loop, other code in threads. A call may ask its owner and wait for
the answer, for example for a reply of the model. The code's output goes to standard error.

The code itself gets an empty stdin. The process ends when the owner closes the pipe. If its code does not let it end,
it kills itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import importlib
import inspect
import itertools
import os
import select
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec

from gristmill import GristmillError
from gristmill_env.errors import EnvError
from gristmill_env.outages import may_pass
from gristmill_env.values import message_of, whole

_HEAD = struct.Struct("<I")
"""The length of a message."""
_PLAIN = frozenset({type(None), bool, float})
_MOST = 1 << 63
"""Integers from here on do not fit into a message."""
THREADS = 256
"""Number of plain calls that run at the same time."""
GRACE = 5.0
"""Seconds that a call has to end after it was cancelled."""
_LONGEST = 1000
"""Characters of an error's text."""
_LONGEST_TRACE = 8000


class Start(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """The first message: which code to load."""

    target: str
    """ "package.module:factory". The factory takes `settings` and returns the `Handler` of all calls."""
    settings: bytes
    path: list[str]
    """The owner's sys.path."""


class Call(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """Begins a call."""

    number: int
    body: bytes


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Cancels a call. The process still reports the call's end."""

    number: int


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """The answer to an `Ask`."""

    number: int
    body: bytes = b""
    failure: Failed | None = None


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The code is loaded."""


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """The end of a call."""

    number: int
    body: bytes


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """A call or an `Ask` raised an error. As the first report: the code cannot be loaded."""

    number: int
    code: str | None
    """Of a GristmillError; None for any other error."""
    error: str
    """The name of the error's class."""
    text: str
    values: dict[str, Any] = {}
    may_pass: bool = False
    trace: str = ""

    @classmethod
    def by(cls, number: int, error: BaseException) -> Failed:
        """Returns the report of an error."""
        known = error if isinstance(error, GristmillError) else None
        return cls(
            number=number,
            code=None if known is None else known.code,
            error=type(error).__name__,
            text=message_of(error)[:_LONGEST],
            values={} if known is None else {name: plain(value) for name, value in known.values.items()},
            may_pass=may_pass(error),
            trace=whole("".join(traceback.format_exception(error))[-_LONGEST_TRACE:]),
        )


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """A call asks its owner."""

    call: int
    number: int
    body: bytes


FromOwner = Start | Call | Cancel | Answer
ToOwner = Ready | Done | Failed | Ask

Asking = Callable[[bytes], Awaitable[bytes]]
"""Asks the owner of a call. Raises EnvError with the code and text of the owner's error."""
Handler = Callable[[bytes, Asking], Awaitable[bytes]]
"""Runs a call."""

_encoder = msgspec.msgpack.Encoder()
_from_owner: msgspec.msgpack.Decoder[FromOwner] = msgspec.msgpack.Decoder(FromOwner)
_to_owner: msgspec.msgpack.Decoder[ToOwner] = msgspec.msgpack.Decoder(ToOwner)


def framed(message: FromOwner | ToOwner) -> bytes:
    """Returns the bytes of a message with its length."""
    body = _encoder.encode(message)
    return _HEAD.pack(len(body)) + body


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


async def run(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Calls a user's function: an `async` one on the event loop, a plain one in a thread.

    If this is cancelled, waits for the end of the thread, so that a thread that hangs costs the process.
    """
    if inspect.iscoroutinefunction(inspect.unwrap(function)):
        return await function(*arguments, **named)
    context = contextvars.copy_context()
    call = functools.partial(context.run, _called, function, *arguments, **named)
    future = asyncio.get_running_loop().run_in_executor(None, call)
    try:
        value = await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        raise
    return await value if inspect.isawaitable(value) else value


def _called(function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
    try:
        return function(*arguments, **named)
    except StopIteration as error:  # asyncio cannot raise it from a future, which would never end
        raise RuntimeError("StopIteration") from error


async def threads_end() -> None:
    """Waits until no thread runs code of this call: also a thread of `asyncio.to_thread` that no task waits for."""
    if running := [future for future in list(_OF_CALL.get(())) if not future.done()]:
        await asyncio.wait([asyncio.wrap_future(future) for future in running])


class _Threads(ThreadPoolExecutor):
    """The threads of this process. Notes which call a thread works for."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future = super().submit(function, *arguments, **named)
        threads = _OF_CALL.get(None)
        if threads is not None:
            threads.add(future)
            future.add_done_callback(threads.discard)
        return future


_OF_CALL: contextvars.ContextVar[set[Future[Any]]] = contextvars.ContextVar("threads of the call")


async def read_report(stream: asyncio.StreamReader) -> ToOwner:
    """Returns the next message of the process. Raises asyncio.IncompleteReadError at the end, msgspec.DecodeError."""
    return _to_owner.decode(await _read(stream))


async def _read(stream: asyncio.StreamReader) -> bytes:
    (size,) = _HEAD.unpack(await stream.readexactly(_HEAD.size))
    return await stream.readexactly(size)


class _Host:
    """The calls of this process."""

    def __init__(self, messages: int, reports: int) -> None:
        """File descriptors."""
        self._messages, self._reports = messages, reports
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = itertools.count()

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(_Threads(THREADS, "call"))
        stream = asyncio.StreamReader()
        pipe = os.fdopen(self._messages, "rb", buffering=0)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), pipe)
        start = _from_owner.decode(await _read(stream))
        assert isinstance(start, Start)
        sys.path[:] = start.path
        module, _, factory = start.target.partition(":")
        try:
            handler: Handler = getattr(importlib.import_module(module), factory)(start.settings)
        except (Exception, SystemExit) as error:  # noqa: BLE001  the owner tells it to the user
            self._say(Failed.by(-1, error))
            return
        self._say(Ready())
        with contextlib.suppress(asyncio.IncompleteReadError):  # the owner has closed the pipe
            while True:
                self._receive(_from_owner.decode(await _read(stream)), handler)
        for task in self._calls.values():
            task.cancel()
        await asyncio.gather(*self._calls.values(), return_exceptions=True)

    def _receive(self, message: FromOwner, handler: Handler) -> None:
        if isinstance(message, Call):
            self._calls[message.number] = asyncio.create_task(self._run(handler, message))
        elif isinstance(message, Cancel):
            if message.number in self._calls:
                self._calls[message.number].cancel()
        elif isinstance(message, Answer):
            future = self._asked.pop(message.number, None)
            if future is None or future.done():
                return
            if (failure := message.failure) is None:
                future.set_result(message.body)
            else:
                error = EnvError(failure.code or "owner_failed", failure.text, **failure.values)
                future.set_exception(error.passing(failure.may_pass))

    async def _run(self, handler: Handler, call: Call) -> None:
        async def ask(body: bytes) -> bytes:
            number = next(self._numbers)
            future = self._asked[number] = asyncio.get_running_loop().create_future()
            self._say(Ask(call.number, number, body))
            try:
                answer: bytes = await future
                return answer
            finally:
                self._asked.pop(number, None)

        _OF_CALL.set(set())
        try:
            report: ToOwner = Done(call.number, await handler(call.body, ask))
        except BaseException as error:  # noqa: BLE001  sys.exit() in a call must not end the process
            report = Failed.by(call.number, error)
        finally:
            self._calls.pop(call.number, None)
        self._say(report)

    def _say(self, report: ToOwner) -> None:
        """Writes a report. Blocks while the pipe is full: the owner always reads."""
        view = memoryview(framed(report))
        while view:
            view = view[os.write(self._reports, view) :]


def _end_with_owner(messages: int) -> None:
    """Waits until the owner has closed the pipe, and kills this process and its children if it does not end then."""
    poll = select.poll()
    poll.register(messages, 0)
    poll.poll()
    time.sleep(2 * GRACE)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The owner handles Ctrl-C, and code must not end other calls.
    messages, reports = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # the code's output must not mix with the reports
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # the code and its child processes must not read the messages
    os.close(nothing)
    threading.Thread(target=_end_with_owner, args=[messages], daemon=True).start()
    with contextlib.suppress(BrokenPipeError, asyncio.IncompleteReadError):  # the owner has ended
        asyncio.run(_Host(messages, reports).serve())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads may still run the code of cancelled calls


if __name__ == "__main__":
    from gristmill_env.running.host import main as main_of_the_module  # the one that the user's code shares

    main_of_the_module()
