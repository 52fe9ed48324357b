"""Calls the methods of environments, each within a time limit and never on the service's event loop.

A plain method runs on a thread, and an `async` method on an event loop in a separate thread. A method that blocks
its loop delays the other async calls there, until its time limit. The shipped environments do not block, so they are
called directly.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Self

from gristmill.redaction import redact_text
from gristmill_env.data import Item, Message
from gristmill_env.environments.base import Environment, EnvironmentFactory, Reply, StepResult
from gristmill_env.environments.returned import opening_messages, step_result
from gristmill_env.errors import ROW_ERRORS, EnvError, EpisodeError
from gristmill_env.outages import may_pass
from gristmill_env.rewards.inputs import private
from gristmill_env.running import Call, Limits, Runner
from gristmill_env.running.calls import CallError

logger = logging.getLogger(__name__)

_THREADS = 256
"""Most threads. A step that waits occupies one thread, and every rollout of every group may be in a step."""
_GOODBYE = 5.0
"""Seconds for all close() calls together, after a rollout was cancelled or failed."""

_Result = tuple[Any, Exception | None]
"""A method's return value, or its error."""
Check = Callable[[Any], Any]


def _unchecked(value: Any) -> Any:
    return value


class EnvironmentRunner:
    """The environments of a run. The end of the context (`async with`) stops its threads."""

    def __init__(self, factory: EnvironmentFactory, timeout: float) -> None:
        """`timeout`: seconds that one call of a method may take."""
        self.factory = factory
        self._timeout = timeout
        self._failures: Counter[str] = Counter()
        self._runner = Runner(
            Limits(cpu=math.inf, wall=timeout), threads=_THREADS, what="environment", error=EnvError,
            remedy="give what it waits for a time-out, or raise step_timeout",
        )  # fmt: skip

    async def open(self, late: Callable[[asyncio.Task[None]], object]) -> Environment:
        """Returns a new environment. Raises EpisodeError when its __init__ fails or overruns.

        An __init__ that overruns, or whose rollout is cancelled, continues on its thread. `late` receives the task that
        closes the environment when that __init__ has returned.
        """
        if self.factory.ours:
            return self.factory()
        opening = _Opening(self.factory)
        try:
            opened: Environment = await self._wait(opening)
        except BaseException:
            late(asyncio.create_task(self._close_late(opening.made)))
            raise
        return opened

    async def _close_late(self, made: asyncio.Future[Environment | None]) -> None:
        environment = await made
        if environment is not None and has_close(environment):
            await self.close(environment)

    async def reset(self, environment: Environment, item: Item) -> Sequence[Message]:
        """Calls `reset`. Raises EpisodeError if it fails, overruns or returns no messages, and passes on the package's
        own errors of a row."""
        check = functools.partial(opening_messages, environment, item.index)
        own = item if self.factory.ours else private(item)
        opening: Sequence[Message] = await self._call(environment.reset, own, check=check)
        return opening

    async def step(self, environment: Environment, reply: Reply, row: int | None = None) -> StepResult:
        """Calls `step` with a reply. `row`: the item's index, for messages. Raises as `reset` does."""
        turn: StepResult = await self._call(
            environment.step, reply, check=functools.partial(step_result, environment, row)
        )
        return turn

    async def close(self, environment: Environment) -> None:
        """Closes the environment. Errors are logged, because the rollout is over."""
        try:
            await self._call(environment.close)
        except EnvError as error:
            logger.warning("%s", error)

    async def opening(self, item: Item) -> Sequence[Message]:
        """Returns the opening messages of a rollout that is not played."""
        async with self.opened() as environment:
            return await self.reset(environment, item)

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[Environment]:
        """Opens the environment of one rollout. The end of the context closes it once, however the rollout ends.

        After an error, a time-out or a cancellation, waits at most `_GOODBYE` seconds until it is closed.
        """
        closing: list[asyncio.Task[None]] = []
        environment: Environment | None = None
        closes = False
        try:
            environment = await self.open(closing.append)
            closes = has_close(environment)
            yield environment
            if closes:
                closes = False
                closing.append(asyncio.create_task(self.close(environment)))
                await asyncio.wait(closing)
        except BaseException:
            if environment is not None and closes:
                closing.append(asyncio.create_task(self.close(environment)))
            await self._wait_briefly(closing)
            raise

    async def _wait_briefly(self, closing: list[asyncio.Task[None]]) -> None:
        pending = (await asyncio.wait(closing, timeout=_GOODBYE))[1] if closing else ()
        if pending:
            name, seconds = self.factory.name, _GOODBYE
            logger.warning("__init__ or close() of %s takes longer than %g s and is not waited for", name, seconds)

    def stop(self) -> None:
        """Ends the threads, without waiting for them."""
        self._runner.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def _call(self, method: Callable[..., Any], *arguments: object, check: Check = _unchecked) -> Any:
        if self.factory.ours and inspect.iscoroutinefunction(method):
            return await method(*arguments)
        return await self._wait(_MethodCall(self.factory.name, method.__name__, method, arguments, check))

    async def _wait(self, call: _MethodCall) -> Any:
        batch = self._runner.submit([call])
        try:
            await asyncio.wrap_future(batch.done)
        except asyncio.CancelledError:
            self._runner.drop(batch)
            raise
        value, error = call.result
        if error is not None:
            self._report(call.name, error)
            raise error
        return value

    def _report(self, name: str, error: Exception) -> None:
        """Logs a method's first exception in full, and further exceptions at a count of 10, 100, 1000 and so on."""
        if not isinstance(error.__cause__, Exception):
            return
        self._failures[name] += 1
        if (count := self._failures[name]) == 1:
            logger.error("environment %s failed", name, exc_info=error.__cause__)
        elif str(count).strip("0") == "1":
            logger.error("environment %s has failed %d times, last: %s", name, count, error)


def has_close(environment: Environment) -> bool:
    """Returns whether the environment's class overrides `close`."""
    return type(environment).close is not Environment.close


class _MethodCall(Call[_Result]):
    """One call of one method of one environment."""

    def __init__(
        self,
        name: str,
        method_name: str,
        method: Callable[..., Any],
        arguments: Sequence[object],
        check: Check = _unchecked,
    ) -> None:
        """`check`: returns the method's return value if it is valid, and raises EpisodeError if it is not."""
        # A separate name per method: close() must not queue behind the steps that it should end.
        super().__init__(f"{name}.{method_name}", is_async=inspect.iscoroutinefunction(method), repeatable=False)
        self._method, self._arguments, self._check = method, arguments, check

    def run(self) -> _Result:
        if not self.needed:
            return self.not_needed()
        try:
            value = self._method(*self._arguments)
            if inspect.isawaitable(value):
                if inspect.iscoroutine(value):
                    value.close()
                raise CallError("not_async", "it returns an awaitable but is not `async def`")
            return self._check(value), None
        except BaseException as error:  # noqa: BLE001  sys.exit() in a step must not end this thread
            return self.failed(error)

    async def run_async(self) -> _Result:
        if not self.needed:
            return self.not_needed()
        try:
            return self._check(await self._method(*self._arguments)), None
        except BaseException as error:  # noqa: BLE001  as above; of a cancelled call nobody reads the result
            return self.failed(error)

    def failed(self, why: BaseException) -> _Result:
        if isinstance(why, CallError):
            return None, EpisodeError(why.code, redact_text(f"{self.name}: {why}"), method=self.name, **why.values)
        if isinstance(why, ROW_ERRORS):
            return None, why
        error = EpisodeError(
            "environment_raised",
            redact_text(f"{self.name}: {type(why).__name__}: {why}"),
            method=self.name,
            error=type(why).__name__,
        )
        error.__cause__ = why
        error.may_pass = may_pass(why)
        return None, error


class _Opening(_MethodCall):
    """The call of an environment's __init__. Its result is known even if the call has overrun or is not waited for."""

    def __init__(self, factory: EnvironmentFactory) -> None:
        super().__init__(factory.name, "__init__", factory, ())
        self._loop = asyncio.get_running_loop()
        self.made: asyncio.Future[Environment | None] = self._loop.create_future()
        """Done when the call has ended; None if it made no environment."""

    def run(self) -> _Result:
        result = super().run()
        try:
            self._report(result[0])
        except SystemExit:  # the interruption of an overrunning call arrived after the call; it arrives once
            self._report(result[0])
        return result

    def _report(self, environment: Environment | None) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed, so nothing can close the environment
            self._loop.call_soon_threadsafe(self._set_made, environment)

    def _set_made(self, environment: Environment | None) -> None:
        if not self.made.done():
            self.made.set_result(environment)
