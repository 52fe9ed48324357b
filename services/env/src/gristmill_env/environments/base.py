"""The interface of a task: an environment plays a rollout with the model.

One object plays one rollout. Each rollout of a group has its own object, so rollouts share no state. A class overrides
`play`, which asks the model as often as it likes::

    class TwoTries(Environment):
        def __init__(self, *, hint: str = "Try again.") -> None: ...   # options: `environment: {params: {hint: ...}}`
        async def play(self, item: Item, model: Model) -> float | None:
            reply = await model.say(item.messages)
            ...

or `reset` and `step`, which `play` then calls in turn: `reset` returns the messages for the model to answer first, and
`step` receives each reply and returns the next messages, or the end.

Environments of a configuration run in a process of their own. Their plain methods run in threads, and may block for
`step_timeout` seconds. Their `async def` methods run on an event loop that all rollouts share.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from gristmill_env.data import Item, Message
from gristmill_env.environments.model import Model, Reply
from gristmill_env.environments.returned import opening_messages, step_result


@dataclass(frozen=True)
class StepResult:
    """The environment's answer to a reply."""

    messages: tuple[Message, ...] = ()
    """Messages added to the conversation for the model to answer. The loss mask excludes them from training."""
    done: bool = False
    """Whether the rollout is over."""
    reward: float | None = None
    """Added to the rollout's reward, which the reward `episode` puts into the total."""
    trained: bool = True
    """False excludes the last reply from the loss."""

    @classmethod
    def end(cls, reward: float | None = None, *, trained: bool = True) -> StepResult:
        """Returns the last turn."""
        return cls(done=True, reward=reward, trained=trained)


class Environment:
    """One rollout of an item. Its options are the keyword-only arguments of `__init__`.

    A class overrides `play`, or `reset` and `step`.
    """

    max_turns: ClassVar[int] = 16
    """Maximum number of replies in a rollout."""
    runs_user_code: ClassVar[bool] = False
    """Whether an environment of this package runs a user's code, and therefore in a process."""

    async def play(self, item: Item, model: Model) -> float | None:
        """Plays the rollout. Returns its reward, which the reward `episode` puts into the total; None if it has none.

        A group compares its rollouts, so all of them need the same task: derive any randomness from `item.row` alone.
        """
        talk = model.talk
        messages = opening_messages(talk.name, await talk.call(self.reset, item))
        while True:
            reply = await model.reply_to(messages, parse=False)
            result = step_result(talk.name, await talk.call(self.step, reply))
            if result.reward is not None:
                model.reward = result.reward + (model.reward or 0.0)
            if not result.trained:
                await model.leave_out(reply)
            if result.done:
                return model.reward
            messages = result.messages

    def reset(self, item: Item) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """Begins a rollout. Returns at least one message for the model to answer, without the run's system prompt."""
        raise NotImplementedError(f"{type(self).__name__} has neither `play` nor `reset` and `step`")

    def step(self, reply: Reply) -> StepResult | Awaitable[StepResult]:
        """Continues after a reply."""
        raise NotImplementedError(f"{type(self).__name__} has neither `play` nor `step`")

    def close(self) -> Awaitable[None] | None:
        """Releases the rollout's resources: a sandbox, a connection. Called once, however the rollout ends.

        After an error, a time-out or a cancellation, close has 5 seconds. A plain method that did not end may still run
        in another thread.
        """
        return None


class DatasetEnvironment(Environment):
    """A row's prompt and one reply: the environment of a run without an `environment:` section."""

    max_turns: ClassVar[int] = 1

    async def reset(self, item: Item) -> Sequence[Message]:
        """Returns the row's messages."""
        return item.messages

    async def step(self, reply: Reply) -> StepResult:
        """Ends the rollout."""
        return StepResult.end()
