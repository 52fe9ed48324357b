"""Plays one rollout where the environment's code runs: in its process, or in this one for a class without a process."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from gristmill.redaction import redact_text
from gristmill_env.data import Item
from gristmill_env.environments.base import Environment
from gristmill_env.environments.model import Asking, End, Model, NoMoreRepliesError, Talk
from gristmill_env.environments.registry import EnvironmentFactory
from gristmill_env.environments.returned import EnvironmentName, checked_reward, turn_limit
from gristmill_env.errors import ROW_ERRORS, EpisodeError
from gristmill_env.outages import may_pass
from gristmill_env.running.host import Failed, run, threads_end
from gristmill_env.values import message_of

_MOMENT = 0.5
"""Seconds that a method has to end before its environment is closed, when its rollout is cancelled or overran."""


async def played(environment: Environment, item: Item, talk: Talk) -> End:
    """Plays an environment. Raises what its methods raise, and EpisodeError for wrong values."""
    name = talk.name
    talk.max_turns = turn_limit(name, environment)
    if not inspect.iscoroutinefunction(environment.play):
        raise EpisodeError("not_async", f"{name}.play must be `async def`", method=f"{name}.play")
    try:
        reward = await environment.play(item, Model(talk))
    except BaseException as error:
        if not _is_end(error):
            raise
        reward = talk.reward
    return End(checked_reward(name, "play", reward), talk.over)


def closes(environment: Environment) -> bool:
    """Returns whether the environment's class overrides `close`."""
    return type(environment).close is not Environment.close


class Rollout:
    """One environment, from its making to its close."""

    def __init__(self, factory: EnvironmentFactory, item: Item, ask: Asking, limit: float, *, waits: bool) -> None:
        """`limit`: seconds that a method may take between two replies of the model. `waits`: whether a cancelled
        rollout ends only when no method of it runs any more, so that a method that hangs costs its process."""
        self._factory, self._item, self._ask = factory, item, ask
        self._limit, self._waits = limit, waits
        self._name = EnvironmentName(factory.name, item.index)
        self._method = "__init__"
        self._bound: asyncio.Timeout | None = None
        self._saying = 0
        self._environment: Environment | None = None

    async def play(self) -> Failed | None:
        """Plays the rollout and asks with its `End`. Then closes the environment. Returns the error of its close."""
        playing = asyncio.create_task(self._play())
        try:
            try:
                async with asyncio.timeout(self._limit) as self._bound:
                    await asyncio.wait({playing})
            finally:
                self._bound = None
            end = playing.result()
        except TimeoutError:
            playing.cancel()
            end = End(None, failure=Failed.by(0, self._overran()))
        except asyncio.CancelledError:
            playing.cancel()
            await self._finished(playing)
            if self._waits:
                await threads_end()
            raise
        finishing = asyncio.create_task(self._told_and_finished(end, playing))
        try:
            return await asyncio.shield(finishing)
        except asyncio.CancelledError:
            await asyncio.wait({finishing})  # the runner limits this wait
            raise

    async def _play(self) -> End:
        try:
            await self._make()
            environment = self._environment
            assert environment is not None
            self._method = "play"
            return await played(environment, self._item, Talk(self._ask, self._name, self._pause, self._call))
        except BaseException as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            return End(None, failure=Failed.by(0, self._wrapped(error)))

    async def _make(self) -> None:
        def make() -> None:
            self._environment = self._factory()

        await run(make)

    async def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Calls `reset` or `step`, with a time limit of its own."""
        self._method = method.__name__
        self._restart()
        return await run(method, *arguments)

    def _pause(self, waits: bool) -> None:
        """Stops the clock while the environment waits for the model, and restarts it after that."""
        self._saying += 1 if waits else -1
        self._restart()

    def _restart(self) -> None:
        if self._bound is not None:
            until = asyncio.get_running_loop().time() + self._limit
            self._bound.reschedule(None if self._saying else until)

    def _overran(self) -> EpisodeError:
        name = f"{self._name}.{self._method}"
        return EpisodeError(
            "call_overran",
            f"{name}: it took longer than {self._limit:g} s; give what it waits for a time-out, or raise step_timeout",
            method=name, limit="wall", seconds=self._limit,
        )  # fmt: skip

    def _wrapped(self, error: BaseException) -> BaseException:
        if isinstance(error, ROW_ERRORS):
            return error
        name = f"{self._name}.{self._method}"
        text = redact_text(f"{name}: {type(error).__name__}: {message_of(error)}")
        wrapped = EpisodeError("environment_raised", text, method=name, error=type(error).__name__)
        wrapped.may_pass = may_pass(error)
        wrapped.__cause__ = error
        return wrapped

    async def _told_and_finished(self, end: End, playing: asyncio.Task[End]) -> Failed | None:
        await self._ask(end)
        failure = await self._finished(playing)
        if end.failure is not None and self._waits:
            await threads_end()
        return failure

    async def _finished(self, playing: asyncio.Task[End]) -> Failed | None:
        """Closes the environment, and waits until no method of it runs."""
        await asyncio.wait({playing}, timeout=_MOMENT)
        if self._environment is None:  # __init__ has failed, or still runs
            await asyncio.wait({playing})
        failure = await self._close()
        if self._waits:
            await asyncio.wait({playing})
        elif not playing.done():
            _leave(playing)
        return failure

    async def _close(self) -> Failed | None:
        environment = self._environment
        if environment is None or not closes(environment):
            return None
        self._method = "close"
        try:
            await run(environment.close)
        except BaseException as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            return Failed.by(0, self._wrapped(error))
        return None


_LEFT: set[asyncio.Task[Any]] = set()
"""Rollouts whose end nobody waits for."""


def _leave(task: asyncio.Task[Any]) -> None:
    _LEFT.add(task)
    task.add_done_callback(_LEFT.discard)


def _is_end(error: BaseException) -> bool:
    """Returns whether `play` has ended because the model cannot reply any more, also in a group of its tasks."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(NoMoreRepliesError)[1] is None
    return isinstance(error, NoMoreRepliesError)
