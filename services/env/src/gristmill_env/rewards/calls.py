"""The calls of rewards: in this process (`call_here`), and in child processes (`RewardProcesses`, with `serve` there).

A child process makes all calls of its rewards at the same time. A group's samples are one message. A call that overruns
fails. If it does not end, the next groups go to a new process, and the old one ends with its last group.

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
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from gristmill.internal.redaction import redact_text
from gristmill_env.errors import EnvError, RewardError
from gristmill_env.gather import gather
from gristmill_env.rewards.create import create_reward
from gristmill_env.rewards.inputs import RowSchema, Sample
from gristmill_env.rewards.outcomes import Failure, Outcome, Outcomes
from gristmill_env.rewards.reward import BoundReward, CallableReward, Source
from gristmill_env.running.code_process import CodeError, CodeProcess, LostProcessError
from gristmill_env.running.host import Asking, Handler, plain
from gristmill_env.running.limiter import CallError, Limiter, Limits
from gristmill_env.values import whole

logger = logging.getLogger(__name__)

_PING = b""
_PING_EVERY = 1.0
"""Seconds between two pings of a process that has calls."""
_SPARE = 64
_LONGEST = 8000
"""Characters of a traceback."""
_REPLY = msgspec.msgpack.Decoder(tuple[bool, list[dict[str, Outcome]]])
"""Whether the process has a call that was given up and has not ended; and the outcomes. Not a pickle, because the
process runs third-party code."""


@dataclass(frozen=True)
class Execution:
    """The limits, threads and processes for the calls of a run's rewards."""

    limits: Limits = field(default_factory=lambda: Limits(cpu=60.0, wall=600.0))
    """The limits of one call. `cpu` is also how long a process may be blocked."""
    threads: int = 32
    """Maximum number of threads for rewards that are not async."""
    processes: int = 2
    """Number of processes for each reward with `process: true`."""


async def call_here(bound: BoundReward, samples: Sequence[Sample], limiter: Limiter) -> list[Outcomes]:
    """Calls a reward for a group, in this process. Returns the outcomes for each sample.

    The time and memory of a reward of this package are bounded: it runs on this event loop if it is async, and
    otherwise in one thread for the group. Any other code runs within the limits of `limiter`.
    """
    calls = bound.calls(samples)
    found: Sequence[list[Outcomes] | CallError]
    if bound.reward.is_built_in and bound.is_async:
        found = await gather(bound.call_async(call) for call in calls)
    elif bound.reward.is_built_in:
        found = await asyncio.to_thread(lambda: [bound.call(call) for call in calls])
    elif bound.is_async:
        found = await limiter.on_loop(bound.call_async(call) for call in calls)
    else:
        found = await limiter.in_threads(partial(bound.call, call) for call in calls)
    results = (
        bound.failed(one, call) if isinstance(one, CallError) else one for call, one in zip(calls, found, strict=True)
    )
    return [outcomes for result in results for outcomes in result]


@dataclass(eq=False)
class _Process:
    """A process and its state."""

    code: CodeProcess
    calls: int = 0
    """Calls in work."""
    watch: asyncio.Task[None] | None = None
    ending: asyncio.Task[None] | None = None
    retired: bool = False
    """Whether it gets no more calls and ends with its last one."""


class RewardProcesses:
    """The processes of some rewards. They start with `start`, or with the first call."""

    def __init__(self, sources: Mapping[str, Source], schema: RowSchema, execution: Execution, size: int) -> None:
        """`sources`: of the rewards, by full name. `size`: number of processes; each serves all rewards."""
        self._settings = pickle.dumps((dict(sources), schema, execution))
        self._what = f"reward{'s' if len(sources) > 1 else ''} {', '.join(map(repr, sources))}"
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

    async def call(self, bound: BoundReward, samples: Sequence[Sample]) -> list[Outcomes]:
        """Calls a reward for a group, in the process with the fewest calls. Returns the outcomes for each sample.

        If that process is lost, each call is repeated in a process that makes no other call meanwhile.
        """
        if not bound.reward.reads_tokens:
            samples = [replace(sample, tokens=None) for sample in samples]
        try:
            return await self._ask(min(self._serving, key=lambda process: process.calls), bound, samples)
        except LostProcessError as error:
            if error.code == "process_not_started":
                return bound.failed(self._why(error, bound), samples)
        except EnvError as error:
            return bound.failed(error, samples)
        outcomes: list[Outcomes] = []
        for call in bound.calls(samples):
            try:
                async with self._one:
                    outcomes += await self._ask(self._lonely, bound, call)
            except EnvError as error:
                outcomes += bound.failed(self._why(error, bound), call)
        return outcomes

    async def close(self) -> None:
        """Ends the processes. Calls in work end with LostProcessError."""
        processes = [*self._serving, self._lonely, *self._retired]
        for process in processes:
            if process.watch is not None:
                process.watch.cancel()
        await gather(process.code.close() for process in processes)

    def _new(self) -> _Process:
        return _Process(CodeProcess(f"{__name__}:serve", self._settings, self._what))

    async def _ask(self, process: _Process, bound: BoundReward, samples: Sequence[Sample]) -> list[Outcomes]:
        """Raises CodeError, LostProcessError, and RewardError if the samples cannot be sent."""
        try:
            body = pickle.dumps((bound.name, list(samples)))
        except Exception as error:  # noqa: BLE001  a column may hold anything
            raise RewardError(
                "samples_not_picklable",
                f"its samples cannot be sent to a process: {type(error).__name__}: {error}",
                error=type(error).__name__,
            ) from None
        process.calls += 1
        if process.watch is None or process.watch.done():
            process.watch = asyncio.create_task(self._watch(process))
        try:
            hangs, found = _REPLY.decode(await process.code.call(body))
            if hangs:
                self._retire(process)
            return [{name: _received(one) for name, one in outcomes.items()} for outcomes in found]
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
                continue  # it is dead, or its calls report the reason

    def _end_if_idle(self, process: _Process) -> None:
        if process.retired and not process.calls and process.ending is None:
            process.ending = asyncio.create_task(process.code.close())
            process.ending.add_done_callback(lambda _: self._retired.discard(process))

    def _why(self, error: EnvError, bound: BoundReward) -> EnvError:
        """Returns the error of a call that was alone in a process when it was lost."""
        if not isinstance(error, LostProcessError):
            return error
        if error.code != "process_killed":
            return CallError(error.code, str(error), **error.values)
        seconds = self._patience
        if bound.is_async:
            return CallError(
                "loop_blocked",
                f"it blocked its event loop for {seconds:g} s; await what it waits for, or use def",
                seconds=seconds,
            )
        return CallError("call_overran", f"it blocked its process for {seconds:g} s", limit="cpu", seconds=seconds)


def processes_of(
    rewards: Mapping[str, CallableReward], schema: RowSchema, execution: Execution
) -> dict[str, RewardProcesses]:
    """Returns the processes of the rewards that have a `source`, by the reward's full name."""
    sources = {name: reward.source for name, reward in rewards.items() if reward.source is not None}
    shared = {name: source for name, source in sources.items() if not source.alone}
    alone = [{name: source} for name, source in sources.items() if source.alone]
    processes: dict[str, RewardProcesses] = {}
    for together, size in [(shared, 1), *((one, execution.processes) for one in alone)]:
        processes |= dict.fromkeys(together, RewardProcesses(together, schema, execution, size)) if together else {}
    return processes


def _received(outcome: Outcome) -> Outcome:
    if not isinstance(outcome, Failure):
        return outcome
    return replace(outcome, text=redact_text(outcome.text), trace=redact_text(outcome.trace))


# --- In the process ---------------------------------------------------------------------------------------------


def serve(settings: bytes) -> Handler:
    """Returns the handler of a process's calls: from a reward's name and pickled samples to encoded outcomes."""
    sources, schema, execution = pickle.loads(settings)
    # As many threads as calls may hang before the process is replaced, and more.
    limiter = Limiter(execution.limits, execution.threads, ThreadPoolExecutor(2 * execution.threads + _SPARE, "call"))
    served: dict[str, BoundReward] = {}
    for name, source in sources.items():
        reward = create_reward(source.spec, folder=source.folder).here()
        assert isinstance(reward, CallableReward)
        for bound in (reward.bind(schema, name), reward.extraction(name)):
            served[bound.name] = bound

    async def handle(body: bytes, _ask: Asking) -> bytes:
        outcomes: list[Outcomes] = []
        if body != _PING:
            name, samples = pickle.loads(body)
            outcomes = _sent(await call_here(served[name], samples, limiter))
        return msgspec.msgpack.encode((limiter.hangs, outcomes))

    return handle


def _sent(found: Sequence[Outcomes]) -> list[Outcomes]:
    """Returns the outcomes in a form that a message can hold, with the traceback of the first failure."""
    failures = (one for outcomes in found for one in outcomes.values() if isinstance(one, Failure))
    first = next(failures, None)

    def sent(outcome: Outcome) -> Outcome:
        if not isinstance(outcome, Failure):
            return whole(outcome) if isinstance(outcome, str) else outcome
        traced = outcome is first and outcome.cause is not None
        trace = "".join(traceback.format_exception(outcome.cause))[-_LONGEST:] if traced else ""
        values = {name: plain(value) for name, value in outcome.values.items()}
        return replace(outcome, values=values, cause=None, trace=whole(trace))

    return [{whole(name): sent(one) for name, one in outcomes.items()} for outcomes in found]
