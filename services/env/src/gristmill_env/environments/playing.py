"""Plays one rollout where the environment's code runs: in its process, or in this one for a class without a process."""

from __future__ import annotations

import asyncio
import inspect

from gristmill.internal.redaction import redact_text
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


class Episode:
    """One environment, from its making to its close."""

    def __init__(self, factory: EnvironmentFactory, item: Item, ask: Asking, limit: float) -> None:
        """`limit`: seconds that a method may take between two replies of the model."""
        self._factory, self._item = factory, item
        self._talk = Talk(ask, EnvironmentName(factory.name, item.index), limit)
        self._environment: Environment | None = None

    async def play(self) -> Failed | None:
        """Plays the rollout and asks with its `End`. Then closes the environment. Returns the error of its close.

        Ends only when no method runs any more, so that a method that hangs costs its process.
        """
        playing = asyncio.create_task(self._play())
        try:
            if await self._talk.in_time(playing):
                end = playing.result()
            else:
                playing.cancel()
                end = End(None, failure=Failed.by(0, self._overran()))
        except asyncio.CancelledError:
            playing.cancel()
            await self._finished(playing, cut=True)
            raise
        finishing = asyncio.create_task(self._told_and_finished(end, playing))
        try:
            return await asyncio.shield(finishing)
        except asyncio.CancelledError:
            await asyncio.wait({finishing})  # the runner limits this wait
            raise

    async def _play(self) -> End:
        talk = self._talk
        try:
            await self._make()
            environment = self._environment
            assert environment is not None
            talk.method = "play"
            talk.max_turns = turn_limit(talk.name, environment)
            if not inspect.iscoroutinefunction(environment.play):
                raise EpisodeError("not_async", f"{talk.name}.play must be `async def`", method=f"{talk.name}.play")
            try:
                reward = await environment.play(self._item, Model(talk))
            except BaseException as error:
                if not _is_end(error):
                    raise
                reward = talk.reward
            return End(checked_reward(talk.name, "play", reward), talk.over)
        except BaseException as error:
            if _is_cancelled(error):
                raise
            return End(None, failure=Failed.by(0, self._wrapped(error)))

    async def _make(self) -> None:
        def make() -> None:
            self._environment = self._factory()

        if self._factory.ours:  # it does not block
            make()
        else:
            await run(make)

    def _overran(self) -> EpisodeError:
        name, limit = self._talk.place, self._talk.limit
        return EpisodeError(
            "call_overran",
            f"{name}: it took longer than {limit:g} s; give what it waits for a time-out, or raise step_timeout",
            method=name, limit="wall", seconds=limit,
        )  # fmt: skip

    def _wrapped(self, error: BaseException) -> BaseException:
        if isinstance(error, ROW_ERRORS):
            return error
        name = self._talk.place
        text = redact_text(f"{name}: {type(error).__name__}: {message_of(error)}")
        wrapped = EpisodeError("environment_raised", text, method=name, error=type(error).__name__)
        wrapped.__cause__ = error
        return wrapped.passing(may_pass(error))

    async def _told_and_finished(self, end: End, playing: asyncio.Task[End]) -> Failed | None:
        await self._talk.ask(end)
        return await self._finished(playing, cut=end.failure is not None)

    async def _finished(self, playing: asyncio.Task[End], *, cut: bool) -> Failed | None:
        """Closes the environment, and waits until no method of it runs. `cut`: waits for all threads of the call."""
        await asyncio.wait({playing}, timeout=_MOMENT)
        if self._environment is None:  # __init__ has failed, or still runs
            await asyncio.wait({playing})
        failure = await self._close()
        await asyncio.wait({playing})
        if cut:
            await threads_end()
        return failure

    async def _close(self) -> Failed | None:
        environment = self._environment
        if environment is None or type(environment).close is Environment.close:
            return None
        self._talk.method = "close"
        try:
            await run(environment.close)
        except BaseException as error:
            if _is_cancelled(error):
                raise
            return Failed.by(0, self._wrapped(error))
        return None


def _is_cancelled(error: BaseException) -> bool:
    """Returns whether the error is the cancellation of the running task, and not an error of a user's code."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def _is_end(error: BaseException) -> bool:
    """Returns whether `play` has ended because the model cannot reply any more, also in a group of its tasks."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(NoMoreRepliesError)[1] is None
    return isinstance(error, NoMoreRepliesError)
