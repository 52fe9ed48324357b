"""What a task in turns is: the environment speaks, the model replies, until the environment is done.

One object plays one attempt. A group's attempts are objects of their own, so that no state is shared::

    class Guess(Environment):
        def __init__(self, *, tries: int = 3) -> None: ...           # options: `environment: {params: {tries: 5}}`
        def reset(self, item: Item) -> Sequence[Message]: ...         # what the model is to answer first
        def step(self, reply: Reply) -> Turn: ...                     # what comes next, or the end

The order is reset, then generation and step in turn, until a Turn is `done`, a reply was cut, the tokens are
spent, or `max_turns` is reached; then close. A plain method runs on a thread, and may block for `step_timeout` seconds.
An `async def` one runs on an event loop that all attempts share, but no other part of the service.
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
    """What the model said in a turn."""

    text: str
    """Without special tokens; with the prefill, and with a `<think>` that the chat template opened."""
    finish_reason: str
    """ "stop", or "length" when it was cut."""
    tokens: int | None
    """Tokens sampled; None where a text server does not tell."""


@dataclass(frozen=True)
class Turn:
    """The environment's answer to a reply."""

    messages: tuple[Message, ...] = ()
    """Added to the conversation for the model to reply to. They are in the loss mask as not trained."""
    done: bool = False
    """The attempt is over."""
    reward: float | None = None
    """Added to the attempt's own reward, which the reward `episode` puts into the total."""
    trained: bool = True
    """False leaves the reply that was just given out of the loss."""

    @classmethod
    def end(cls, reward: float | None = None, *, trained: bool = True) -> Turn:
        """The last turn."""
        return cls(done=True, reward=reward, trained=trained)


class Environment(ABC):
    """One attempt at an item. Its options are the keyword-only arguments of `__init__`."""

    max_turns: ClassVar[int] = 16
    """Replies after which the attempt ends in any case."""

    @abstractmethod
    def reset(self, item: Item) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """Begin. Returns what the model is to answer, without the run's system prompt; at least one message.

        A group compares its attempts, so each must be given the same task: let chance depend on `item.row` alone.
        """

    @abstractmethod
    def step(self, reply: Reply) -> Turn | Awaitable[Turn]:
        """Continue after a reply."""

    def close(self) -> Awaitable[None] | None:
        """Give back what the attempt holds: a sandbox, a connection. Called once, however the attempt ends.

        After an error, a time-out or a cancellation it has 5 seconds, and a step that did not end may still be running
        on another thread.
        """
        return None


class DatasetEnvironment(Environment):
    """A row's prompt, one reply, the end: what a data set without an `environment:` of its own is."""

    max_turns: ClassVar[int] = 1

    async def reset(self, item: Item) -> Sequence[Message]:
        """The row's messages."""
        return item.messages

    async def step(self, reply: Reply) -> Turn:
        """Nothing more to say."""
        return Turn.end()
