"""A process that runs a user's code: environments, agents and rewards.

The process serves many calls at the same time. A call that hangs costs the process: the other calls in it are
cancelled and fail with an error that may pass, the process is killed, and the next call starts a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Self

from gristmill.internal.redaction import redact_text
from gristmill_env.errors import EnvError
from gristmill_env.running import host
from gristmill_env.running.host import GRACE

logger = logging.getLogger(__name__)

_START = 120.0
"""Seconds to load the code. Torch alone takes several, and more on a busy machine with a cold disk cache."""

Answerer = Callable[[bytes], Awaitable[bytes]]
"""Answers what a call asks. Raises EnvError."""


class CodeError(EnvError):
    """A call of a user's code failed."""

    raised = False
    """Whether the code raised an error of its own, not one of Gristmill."""
    kind = ""
    """The name of the error's class."""
    trace = ""

    @classmethod
    def of(cls, failure: host.Failed) -> Self:
        """Returns the error that the process reports."""
        error = cls(failure.code or "code_raised", redact_text(failure.text), **failure.values)
        error.raised = failure.code is None
        error.kind = failure.error
        error.trace = redact_text(failure.trace)
        return error.passing(failure.may_pass)


class FirstErrors:
    """Logs the first exception of each piece of code with its traceback, and further ones at 10, 100, 1000..."""

    def __init__(self, logger: logging.Logger, what: str) -> None:
        """`what`: the kind of code, for messages."""
        self._logger, self._what = logger, what
        self._counts: Counter[str] = Counter()

    def log(self, name: str, text: str, trace: str) -> None:
        """Counts an exception of the code `name`."""
        self._counts[name] += 1
        if (count := self._counts[name]) == 1:
            self._logger.error("%s failed: %s", self._what, text, extra={"trace": trace})
        elif str(count).strip("0") == "1":
            self._logger.error("%s %s has failed %d times, last: %s", self._what, name, count, text)


class LostProcessError(EnvError):
    """The process ended during the call."""


@dataclass(eq=False)
class _Working:
    """A call in work."""

    result: asyncio.Future[bytes]
    answer: Answerer | None
    answers: set[asyncio.Task[None]] = field(default_factory=set)


class CodeProcess:
    """The process for one piece of code, with all calls of it. The end of the context (`async with`) ends it."""

    def __init__(self, target: str, settings: bytes, what: str, *, quiet: bool = False) -> None:
        """`target`: "package.module:factory" (`host.Start`). `what`: the code's name, for messages. `quiet`: the
        process's standard error is discarded."""
        self._start = host.Start(target, settings, list(sys.path))
        self._what, self._quiet = what, quiet
        self._life: _Life | None = None
        self._starting = asyncio.Lock()
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process's id; None if no process runs."""
        return self._life.pid if self._life is not None and self._life.alive else None

    async def start(self) -> None:
        """Starts the process, unless it runs. Raises CodeError if the code cannot be loaded, LostProcessError."""
        await self._living()

    async def call(self, body: bytes, answer: Answerer | None = None) -> bytes:
        """Runs a call. `answer`: answers what the call asks.

        If this is cancelled, so is the call; a call that does not end then costs the process. Raises CodeError,
        LostProcessError.
        """
        return await (await self._living()).call(body, answer)

    async def kill(self) -> int | None:
        """Kills the process, if one was started. Returns its exit status, negative for a signal.

        Calls in work end with LostProcessError. The next call starts another process.
        """
        return None if self._life is None else await self._life.kill()

    async def close(self) -> None:
        """Ends the process. Calls in work are cancelled and have `GRACE` seconds."""
        self._closed = True
        if self._life is not None:
            await self._life.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _living(self) -> _Life:
        async with self._starting:
            if self._closed:
                raise LostProcessError("process_closed", f"the process of {self._what} is closed")
            if self._life is None or not self._life.alive:
                self._life = await _Life.begin(self._start, self._what, quiet=self._quiet)
            return self._life


class _Life:
    """One process, from its start to its end."""

    def __init__(self, process: asyncio.subprocess.Process, what: str) -> None:
        self._process, self._what = process, what
        self._working: dict[int, _Working] = {}
        self._numbers = itertools.count()
        self._killed_for_hanging = False
        self._reader: asyncio.Task[None] | None = None

    @classmethod
    async def begin(cls, start: host.Start, what: str, *, quiet: bool) -> Self:
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "gristmill_env.running.host",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL if quiet else None,
                start_new_session=True,  # its own child processes are in its group and are killed with it
            )  # fmt: skip
        except OSError as error:
            raise LostProcessError(
                "process_not_started", f"the process of {what} could not be started: {error}", what=what
            ) from error
        life = cls(process, what)
        assert process.stdout is not None
        try:
            life._send(start)
            async with asyncio.timeout(_START):
                first = await host.read_report(process.stdout)
        except (TimeoutError, asyncio.IncompleteReadError, ValueError) as error:
            await life.kill()
            raise LostProcessError(
                "process_not_started", f"the process of {what} did not start; its output is above", what=what
            ) from error
        except BaseException:
            await life.kill()
            raise
        if isinstance(first, host.Failed):
            await life.kill()
            raise CodeError.of(first)
        life._reader = asyncio.create_task(life._read())
        return life

    @property
    def alive(self) -> bool:
        reads = self._reader is not None and not self._reader.done()
        return reads and self._process.returncode is None and not self._killed_for_hanging

    @property
    def pid(self) -> int:
        return self._process.pid

    async def call(self, body: bytes, answer: Answerer | None) -> bytes:
        number = next(self._numbers)
        working = _Working(asyncio.get_running_loop().create_future(), answer)

        def ended(result: asyncio.Future[bytes]) -> None:
            del self._working[number]
            for task in working.answers:
                task.cancel()
            result.exception()  # so that the error of a cancelled call counts as read

        self._working[number] = working
        working.result.add_done_callback(ended)
        self._send(host.Call(number, body))
        if not self.alive:
            self._lose(working)
        try:
            return await asyncio.shield(working.result)
        except asyncio.CancelledError:
            await asyncio.shield(self._cancel(number, working))  # a second cancellation does not stop it
            raise

    async def _cancel(self, number: int, working: _Working) -> None:
        """Cancels a call, and ends the process if the call does not end."""
        self._send(host.Cancel(number))
        await asyncio.wait([working.result], timeout=GRACE)
        if not working.result.done():
            logger.warning("%s does not end when it is cancelled; its process is killed", self._what)
            self._killed_for_hanging = True
            await self.close()  # which lets the other calls release what they hold

    async def close(self) -> None:
        """Closes the process's input, so that it cancels its calls and ends; kills it after `GRACE` seconds."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE):
                await self._process.wait()
        await self.kill()

    async def kill(self) -> int:
        """Kills the process and the processes that it has started. Returns its exit status."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        status = await self._process.wait()
        if self._reader is not None:
            await asyncio.wait([self._reader])
        return status

    def _send(self, message: host.FromOwner) -> None:
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(host.framed(message))

    async def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            while True:
                self._receive(await host.read_report(self._process.stdout))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the process has ended
        except ValueError:
            logger.exception("the process of %s sent what is no report; it is killed", self._what)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        finally:
            for working in self._working.values():
                self._lose(working)

    def _receive(self, report: host.ToOwner) -> None:
        if isinstance(report, host.Done | host.Failed):
            working = self._working.get(report.number)
            if working is not None and not working.result.done():
                if isinstance(report, host.Done):
                    working.result.set_result(report.body)
                elif self._killed_for_hanging and report.error == "CancelledError":
                    self._lose(working)
                else:
                    working.result.set_exception(CodeError.of(report))
        elif isinstance(report, host.Ask) and (working := self._working.get(report.call)) is not None:
            task = asyncio.create_task(self._answer(report, working))
            working.answers.add(task)
            task.add_done_callback(working.answers.discard)

    async def _answer(self, ask: host.Ask, working: _Working) -> None:
        try:
            if working.answer is None:
                raise EnvError("asks_nothing", f"{self._what} has nobody to ask")
            self._send(host.Answer(ask.number, await working.answer(ask.body)))
        except EnvError as error:
            self._send(host.Answer(ask.number, failure=host.Failed.by(ask.number, error)))
        except Exception as error:  # noqa: BLE001  a fault of Gristmill ends the call, and the run
            if not working.result.done():
                working.result.set_exception(error)

    def _lose(self, working: _Working) -> None:
        if working.result.done():
            return
        if self._killed_for_hanging:
            error = LostProcessError(
                "process_killed", f"the process of {self._what} was killed, because another call in it hung"
            ).passing()
        else:
            error = LostProcessError("process_died", f"the process of {self._what} has ended; its output is above")
        working.result.set_exception(error)
