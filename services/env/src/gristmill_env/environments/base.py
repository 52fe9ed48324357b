"""The interface of a task in turns: the environment sends messages and the model replies, until the task is done.

One object plays one attempt. Each attempt of a group has its own object, so attempts share no state::

    class Guess(Environment):
        def __init__(self, *, tries: int = 3) -> None: ...           # options: `environment: {params: {tries: 5}}`
        def reset(self, item: Item) -> Sequence[Message]: ...         # the messages for the model to answer first
        def step(self, reply: Reply) -> Turn: ...                     # the next messages, or the end

The runner calls reset, then generates a reply and calls step in turn. An attempt ends with a Turn that is `done`, a
truncated reply, no tokens left, or `max_turns`. Then the runner calls close. A plain method runs on a thread, and may
block for `step_timeout` seconds. An `async def` method runs on an event loop that all attempts share, but no other
part of the service.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from gristmill_env.data import Item
from gristmill_env.messages import Message


@dataclass(frozen=True)
class Reply:
    """The model's reply in one turn."""

    text: str
    """The reply without special tokens; with the prefill, and with a `<think>` that the chat template opened."""
    finish_reason: str
    """ "stop", or "length" for a truncated reply."""
    tokens: int | None
    """Tokens sampled; None if a text server does not report the number."""


@dataclass(frozen=True)
class Turn:
    """The environment's answer to a reply."""

    messages: tuple[Message, ...] = ()
    """Messages added to the conversation for the model to answer. The loss mask excludes them from training."""
    done: bool = False
    """Whether the attempt is over."""
    reward: float | None = None
    """Added to the attempt's reward, which the reward `episode` puts into the total."""
    trained: bool = True
    """False excludes the last reply from the loss."""

    @classmethod
    def end(cls, reward: float | None = None, *, trained: bool = True) -> Turn:
        """Returns the last turn."""
        return cls(done=True, reward=reward, trained=trained)


class Environment(ABC):
    """One attempt at an item. Its options are the keyword-only arguments of `__init__`."""

    max_turns: ClassVar[int] = 16
    """Maximum number of replies in an attempt."""

    @abstractmethod
    def reset(self, item: Item) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """Begins an attempt. Returns at least one message for the model to answer, without the run's system prompt.

        A group compares its attempts, so all of them need the same task: derive any randomness from `item.row` alone.
        """

    @abstractmethod
    def step(self, reply: Reply) -> Turn | Awaitable[Turn]:
        """Continues after a reply."""

    def close(self) -> Awaitable[None] | None:
        """Releases the attempt's resources: a sandbox, a connection. Called once, however the attempt ends.

        After an error, a time-out or a cancellation, close has 5 seconds. A step that did not end may still run on
        another thread.
        """
        return None


class DatasetEnvironment(Environment):
    """A row's prompt and one reply: the environment of a run without an `environment:` section."""

    max_turns: ClassVar[int] = 1

    async def reset(self, item: Item) -> Sequence[Message]:
        """Returns the row's messages."""
        return item.messages

    async def step(self, reply: Reply) -> Turn:
        """Ends the attempt."""
        return Turn.end()
