"""Plays rollouts of a run's environment: a user's in its process, the shipped ones in this process.

A class that was made in this process (in a notebook, in a test) cannot be loaded by another process and runs here, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Self

from gristmill.internal.redaction import redact_text
from gristmill_env.data import Item, Message
from gristmill_env.environments import child
from gristmill_env.environments.model import Answer, Asked, End, LeaveOut, Noted, Reply, Say
from gristmill_env.environments.playing import Episode
from gristmill_env.environments.registry import EnvironmentFactory
from gristmill_env.errors import ROW_ERRORS, EnvError, EpisodeError
from gristmill_env.running.code_process import CodeError, CodeProcess, FirstErrors, LostProcessError
from gristmill_env.running.host import GRACE, Failed
from gristmill_env.values import message_of, private

logger = logging.getLogger(__name__)

_GOODBYE = 5.0
"""Seconds for close() after a rollout was cancelled or failed."""
_KINDS = {kind.__name__: kind for kind in ROW_ERRORS}

Answerer = Callable[[Say | LeaveOut], Awaitable[Reply | Any]]
"""Answers what an environment asks. Raises EnvError."""


class Opening(NamedTuple):
    """How a rollout begins."""

    messages: Sequence[Message]
    options: dict[str, Any]
    """Values for the chat template: `tools`."""


class EnvironmentRunner:
    """The environments of a run. The end of the context (`async with`) ends their process."""

    def __init__(self, factory: EnvironmentFactory, timeout: float) -> None:
        """`timeout`: seconds that a method may take between two replies of the model."""
        self.factory = factory
        self._timeout = timeout
        self._errors = FirstErrors(logger, "environment")
        self._process: CodeProcess | None = None
        self._pickled: tuple[Item, bytes] | None = None
        if factory.needs_process:
            assert factory.source is not None
            settings = pickle.dumps((factory.source, timeout))
            self._process = CodeProcess(child.TARGET, settings, f"environment {factory.name}")

    async def play(self, item: Item, answer: Answerer, ended: Callable[[], None] = lambda: None) -> End:
        """Plays one rollout, and closes its environment however the rollout ends.

        `answer`: answers what the environment asks. `ended`: called when only the close is left.
        Raises the first error of `answer`, and one of ROW_ERRORS for an error of the environment.
        """
        loop = asyncio.get_running_loop()
        end: End | None = None
        failed: Exception | None = None
        asking = 0
        # The environment limits its own methods, and names the one that overruns. This limit is for the rest: code that
        # blocks the event loop of its process, and a close that does not end.
        spare = self._timeout + GRACE if self._process is not None else None

        def limit_to(seconds: float | None) -> None:
            with contextlib.suppress(RuntimeError):  # the time is over
                limit.reschedule(None if seconds is None else loop.time() + seconds)

        async def answered(asked: Asked) -> Answer:
            nonlocal end, failed, asking
            if isinstance(asked, End):
                end = asked
                limit_to(self._timeout if end.failure is None else _GOODBYE)
                ended()
                return Noted()
            asking += 1
            if end is None:
                limit_to(None)
            try:
                said: Answer = await answer(asked)
                return said
            except Exception as error:
                if end is None:
                    failed = failed or error
                raise
            finally:
                asking -= 1
                if asking == 0 and end is None:
                    limit_to(spare)

        name, close_error = self.factory.name, None
        try:
            if self._process is not None:
                await self._process.start()  # which is no part of a method's time
            async with asyncio.timeout(spare) as limit:
                close_error = await self._run(item, answered)
        except TimeoutError:
            if not limit.expired():
                raise
            if end is None:
                seconds = self._timeout
                raise EpisodeError(
                    "loop_blocked",
                    f"{name}: a method blocked the event loop of its process for {seconds:g} s; await what it waits "
                    "for, or use def",
                    method=name, seconds=seconds,
                ) from None  # fmt: skip
            logger.warning("a method of %s does not end and is not waited for", name)
        except (CodeError, LostProcessError) as error:
            if end is None:
                raise EpisodeError(error.code, str(error), **error.values).passing(error.may_pass) from error
            logger.warning("%s", error)
        if close_error is not None:
            logger.warning("%s", redact_text(close_error.text))
        if failed is not None:  # whatever the environment has made of it
            raise failed
        assert end is not None
        if end.failure is not None:
            raise self._raised(end.failure)
        return end

    async def opening(self, item: Item) -> Opening:
        """Returns the opening of a rollout that is not played on. Raises as `play` does."""
        said: asyncio.Future[Say] = asyncio.get_running_loop().create_future()

        async def answer(asked: Say | LeaveOut) -> Answer:
            if isinstance(asked, Say) and not said.done():
                said.set_result(asked)
            await asyncio.Event().wait()
            raise AssertionError

        playing = asyncio.create_task(self.play(item, answer))
        waiting: set[asyncio.Future[Any]] = {playing, said}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not said.done():
            await playing
            raise EpisodeError("environment_said_nothing", f"{self.factory.name} has ended without a word to the model")
        playing.cancel()
        await asyncio.wait({playing})
        first = said.result()
        return Opening(first.messages, {"tools": first.tools} if first.tools else {})

    async def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            await self._process.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _run(self, item: Item, answered: Callable[[Asked], Awaitable[Answer]]) -> Failed | None:
        """Returns the error of the environment's close. If this is cancelled, waits for the end of its methods."""
        if self._process is None:
            playing = asyncio.create_task(Episode(self.factory, private(item), answered, self._timeout).play())
            try:
                return await asyncio.shield(playing)
            except asyncio.CancelledError:
                playing.cancel()
                await asyncio.wait({playing}, timeout=_GOODBYE)  # no process can be killed
                raise

        async def answered_bytes(body: bytes) -> bytes:
            return child.encode(await answered(child.asked.decode(body)))

        return child.closed.decode(await self._process.call(self._body(item), answered_bytes))

    def _body(self, item: Item) -> bytes:
        """Returns an item for the process. The rollouts of a group begin together, so one is kept."""
        if self._pickled is None or self._pickled[0] is not item:
            try:
                self._pickled = item, pickle.dumps(item)
            except Exception as error:  # a column may hold anything
                raise EpisodeError(
                    "row_not_picklable",
                    f"row {item.index} cannot be sent to the process of {self.factory.name}: "
                    f"{type(error).__name__}: {message_of(error)}",
                    row=item.index,
                ) from error
        return self._pickled[1]

    def _raised(self, failure: Failed) -> EnvError:
        kind, code = _KINDS.get(failure.error, EpisodeError), failure.code or "environment_raised"
        error = kind(code, redact_text(failure.text), **failure.values).passing(failure.may_pass)
        if failure.code == "environment_raised":
            self._errors.log(str(failure.values.get("method")), str(error), failure.trace)
        return error
