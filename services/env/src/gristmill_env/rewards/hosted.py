"""Rewards of a user in processes of their own: `RewardProcesses`, and the child side, `serve`.

A process makes all calls of its rewards at the same time (`task.LimitedCalls`). A group's samples are one message. A
call that overruns fails. If it does not end, the next groups go to a new process, and the old one ends with its last
group.

A process that ends, or does not answer for as long as a call may compute, is replaced. Its calls are repeated one at a
time in another process, so that only the call that ends or blocks its process fails.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from gristmill.redaction import redact_text
from gristmill_env.errors import EnvError, RewardError
from gristmill_env.gather import gather
from gristmill_env.rewards.inputs import RowSchema, Sample
from gristmill_env.rewards.outcomes import Failure, Outcome, Outcomes
from gristmill_env.rewards.task import Execution, Extracted, LimitedCalls, Task
from gristmill_env.running.child import plain
from gristmill_env.running.code_process import CodeError, CodeProcess, LostProcessError
from gristmill_env.running.host import Asking, Handler
from gristmill_env.running.limiter import Limiter
from gristmill_env.running.limits import CallError
from gristmill_env.values import whole

logger = logging.getLogger(__name__)

_PING = b""
_PING_EVERY = 1.0
"""Seconds between two pings of a process that has calls."""
_SPARE = 64
_LONGEST = 8000
"""Characters of a traceback."""


class _Failure(msgspec.Struct, frozen=True, array_like=True):
    """A failure in a message. Not a pickle, because the process runs third-party code."""

    text: str
    code: str
    values: dict[str, Any]
    may_pass: bool = False
    trace: str = ""


_OUTCOMES = msgspec.msgpack.Decoder(list[dict[str, float | _Failure | None]])
_ANSWERS = msgspec.msgpack.Decoder(list[str | _Failure | None])
_WELL, _HANGS = b"\0", b"\1"
"""The first byte of each reply: whether all calls have ended that were given up. The outcomes or answers follow."""


@dataclass(eq=False)
class _Process:
    """A process, and what is known about it."""

    code: CodeProcess
    calls: int = 0
    """Calls in work."""
    watch: asyncio.Task[None] | None = None
    ending: asyncio.Task[None] | None = None
    retired: bool = False
    """Whether it gets no more calls and ends with its last one."""


class RewardProcesses:
    """The processes of some rewards. They start with `start`, or with the first call."""

    def __init__(self, tasks: Sequence[Task], schema: RowSchema, execution: Execution, size: int) -> None:
        """`tasks`: of rewards with a `source`. `size`: number of processes; each serves all tasks."""
        orders = [(task.reward.source, task.name) for task in tasks]
        self._settings = pickle.dumps((orders, schema, execution))
        self._what = f"reward{'s' if len(tasks) > 1 else ''} {', '.join(repr(task.name) for task in tasks)}"
        self._patience = execution.limits.cpu
        self._serving = [self._new() for _ in range(size)]
        self._lonely = self._new()
        self._one = asyncio.Lock()
        self._retired: set[_Process] = set()

    async def start(self) -> None:
        """Starts the processes. Raises RewardError if the code of a reward cannot be loaded there."""
        try:
            await gather(process.code.start() for process in self._serving)
        except (CodeError, LostProcessError) as error:
            raise RewardError(error.code, f"the process of {self._what}: {error}", **error.values) from error

    async def ask(self, body: bytes) -> bytes:
        """Runs a call in the process with the fewest calls. Raises CodeError, LostProcessError."""
        return await self._ask(min(self._serving, key=lambda process: process.calls), body)

    async def ask_alone(self, body: bytes) -> bytes:
        """Runs a call in a process that makes no other call meanwhile. Raises CodeError, LostProcessError."""
        async with self._one:
            return await self._ask(self._lonely, body)

    async def close(self) -> None:
        """Ends the processes. Calls in work end with LostProcessError."""
        processes = [*self._serving, self._lonely, *self._retired]
        for process in processes:
            if process.watch is not None:
                process.watch.cancel()
        await gather(process.code.close() for process in processes)

    def _new(self) -> _Process:
        return _Process(CodeProcess(f"{__name__}:serve", self._settings, self._what))

    async def _ask(self, process: _Process, body: bytes) -> bytes:
        process.calls += 1
        if process.watch is None or process.watch.done():
            process.watch = asyncio.create_task(self._watch(process))
        try:
            reply = await process.code.call(body)
            if reply[:1] == _HANGS:
                self._retire(process)
            return reply[1:]
        finally:
            process.calls -= 1
            self._end_if_idle(process)

    def _retire(self, process: _Process) -> None:
        if process.retired:
            return
        logger.warning("a call of %s does not end; its process is replaced", self._what)
        process.retired = True
        self._retired.add(process)
        self._serving = [self._new() if one is process else one for one in self._serving]
        self._lonely = self._new() if self._lonely is process else self._lonely

    async def _watch(self, process: _Process) -> None:
        """Kills the process, with its calls, if it does not answer."""
        while process.calls:
            await asyncio.sleep(min(_PING_EVERY, self._patience))
            if process.code.pid is None:  # it starts
                continue
            try:
                async with asyncio.timeout(self._patience):
                    await process.code.call(_PING)
            except (TimeoutError, EnvError):
                continue  # it is dead, or its calls tell why

    def _end_if_idle(self, process: _Process) -> None:
        if process.retired and not process.calls and process.ending is None:
            process.ending = asyncio.create_task(process.code.close())
            process.ending.add_done_callback(lambda _: self._retired.discard(process))


class HostedCalls:
    """The calls of one task in processes."""

    def __init__(self, task: Task, number: int, processes: RewardProcesses, patience: float) -> None:
        """`number`: the task's place among the tasks of the processes. `patience`: seconds that a process may be
        blocked, for messages."""
        self._task, self._number, self._processes, self._patience = task, number, processes, patience

    async def outcomes(self, samples: Sequence[Sample]) -> list[Outcomes]:
        """Scores a group."""
        if not self._task.reward.reads_tokens:
            samples = [replace(sample, tokens=None) for sample in samples]
        try:
            body = pickle.dumps((self._number, list(samples)))
        except Exception as error:  # noqa: BLE001  a column may hold anything
            why = RewardError(
                "samples_not_picklable",
                f"its samples cannot be sent to a process: {type(error).__name__}: {error}",
                error=type(error).__name__,
            )
            return self._task.failed(why, samples)
        try:
            return _scored(await self._processes.ask(body))
        except CodeError as error:
            return self._task.failed(_not_loaded(error), samples)
        except LostProcessError as error:
            if error.code == "process_not_started":
                return self._task.failed(self._why(error), samples)
            found = []
            for call in self._task.calls(samples):
                found += await self._alone(call)
            return found

    async def extracted(self, texts: Sequence[str], row: Mapping[str, Any]) -> list[Extracted]:
        """Extracts the answers."""
        try:
            body = pickle.dumps((self._number, (list(texts), dict(row))))
        except Exception as error:  # noqa: BLE001  as above
            return [self._task.not_extracted(error)] * len(texts)
        try:
            return _extracted(await self._processes.ask(body))
        except CodeError as error:
            return [self._task.not_extracted(_not_loaded(error))] * len(texts)
        except LostProcessError:
            found: list[Extracted] = []
            for text in texts:
                try:
                    alone = pickle.dumps((self._number, ([text], dict(row))))
                    found += _extracted(await self._processes.ask_alone(alone))
                except (CodeError, LostProcessError) as error:
                    found.append(self._task.not_extracted(self._why(error)))
            return found

    async def _alone(self, samples: Sequence[Sample]) -> list[Outcomes]:
        try:
            return _scored(await self._processes.ask_alone(pickle.dumps((self._number, list(samples)))))
        except (CodeError, LostProcessError) as error:
            return self._task.failed(self._why(error), samples)

    def _why(self, error: CodeError | LostProcessError) -> EnvError:
        """Returns the error of a call that was alone in a process when it was lost."""
        if isinstance(error, CodeError):
            return _not_loaded(error)
        if error.code != "process_killed":
            return CallError(error.code, str(error), **error.values)
        seconds = self._patience
        if self._task.is_async:
            return CallError(
                "loop_blocked",
                f"it blocked its event loop for {seconds:g} s; await what it waits for, or use def",
                seconds=seconds,
            )
        return CallError("call_overran", f"it blocked its process for {seconds:g} s", limit="cpu", seconds=seconds)


def host(
    tasks: Sequence[Task], schema: RowSchema, execution: Execution
) -> tuple[dict[str, HostedCalls], list[RewardProcesses]]:
    """Returns the calls of the tasks whose rewards have a `source`, by the task's name, and their processes."""
    hosted = [task for task in tasks if task.reward.source is not None]
    shared = [task for task in hosted if task.reward.source is not None and not task.reward.source.alone]
    calls: dict[str, HostedCalls] = {}
    all_processes = []
    for together, size in [(shared, 1), *(([task], execution.processes) for task in hosted if task not in shared)]:
        if together:
            processes = RewardProcesses(together, schema, execution, size)
            all_processes.append(processes)
            for number, task in enumerate(together):
                calls[task.name] = HostedCalls(task, number, processes, execution.limits.cpu)
    return calls, all_processes


def _scored(reply: bytes) -> list[Outcomes]:
    return [{name: _received(name, one) for name, one in outcomes.items()} for outcomes in _OUTCOMES.decode(reply)]


def _extracted(reply: bytes) -> list[Extracted]:
    return [_error(answer) if isinstance(answer, _Failure) else answer for answer in _ANSWERS.decode(reply)]


def _received(name: str, outcome: float | _Failure | None) -> Outcome:
    if not isinstance(outcome, _Failure):
        return outcome
    text, trace = redact_text(outcome.text), redact_text(outcome.trace)
    return Failure(name, text, outcome.code, outcome.values, trace=trace, may_pass=outcome.may_pass)


def _error(failure: _Failure) -> RewardError:
    return RewardError(failure.code, redact_text(failure.text), **failure.values)


def _not_loaded(error: CodeError) -> RewardError:
    failed = RewardError(error.code, str(error), **error.values)
    failed.may_pass = error.may_pass
    return failed


# --- In the process ---------------------------------------------------------------------------------------------


def serve(settings: bytes) -> Handler:
    """Returns the handler of a process's calls: from pickled samples or texts to encoded outcomes or answers."""
    from gristmill_env.rewards.create import create_reward  # here, because that module imports this one

    orders, schema, execution = pickle.loads(settings)
    # As many threads as calls may hang before the process is replaced, and more.
    limiter = Limiter(execution.limits, execution.threads, ThreadPoolExecutor(2 * execution.threads + _SPARE, "call"))
    served = []
    for source, name in orders:
        (task,) = create_reward(source.spec, folder=source.folder).here().bind(schema, name)
        served.append(LimitedCalls(task, limiter))

    async def handle(body: bytes, _ask: Asking) -> bytes:
        reply = b"" if body == _PING else msgspec.msgpack.encode(await _work(served, body))
        return (_HANGS if limiter.hangs else _WELL) + reply

    return handle


async def _work(served: Sequence[LimitedCalls], body: bytes) -> list[Any]:
    number, work = pickle.loads(body)
    if isinstance(work, tuple):
        return [_failure(one) if isinstance(one, RewardError) else one for one in await served[number].extracted(*work)]
    found = await served[number].outcomes(work)
    failures = (one for outcomes in found for one in outcomes.values() if isinstance(one, Failure))
    first = next(failures, None)
    return [
        {name: _sent(one, one is first) if isinstance(one, Failure) else one for name, one in outcomes.items()}
        for outcomes in found
    ]


def _sent(failure: Failure, traced: bool) -> _Failure:
    trace = traced and failure.cause is not None and "".join(traceback.format_exception(failure.cause))[-_LONGEST:]
    values = {name: plain(value) for name, value in failure.values.items()}
    return _Failure(failure.text, failure.code, values, failure.may_pass, whole(trace or ""))


def _failure(error: RewardError) -> _Failure:
    return _Failure(str(error), error.code, {name: plain(value) for name, value in error.values.items()})
