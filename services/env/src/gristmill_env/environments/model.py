"""The model in training as an environment sees it: conversations, which may branch, and replies.

The environment's process and the service exchange the messages of this module (`Say` and the others).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self

import msgspec

from gristmill_env.data import Message
from gristmill_env.environments.functions import Tool, schema_of
from gristmill_env.environments.returned import EnvironmentName, checked_reward, said_messages
from gristmill_env.errors import EpisodeError
from gristmill_env.running.host import Failed, run


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a tool, as the model wrote it."""

    id: str
    name: str
    arguments: dict[str, Any] | None
    """None if `text` is not a JSON object."""
    text: str
    """The arguments as the model wrote them."""


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """The model's reply."""

    text: str
    """The whole reply without the tokens that end a turn, with its reasoning and tool calls as the model wrote them,
    with the prefill, and with a `<think>` that the template opened."""
    finish_reason: str
    """ "stop", or "length" for a truncated reply."""
    tokens: int | None
    """Tokens sampled; None if a text server does not report the number."""
    answer: str = ""
    """`text` without reasoning and tool calls, if the model server parses them; else `text`."""
    reasoning: str = ""
    """The reasoning, if the model server parses it."""
    tool_calls: tuple[ToolCall, ...] = ()
    turn: int = -1
    """Number of the reply in its rollout, for `Model.leave_out`."""


class NoMoreRepliesError(EpisodeError):
    """The conversation cannot go on. If `play` does not catch this, the rollout ends and is trained on as truncated."""

    def __init__(self, reason: str) -> None:
        """`reason`: "length" if no room is left or the previous reply was truncated, "turns" at `max_turns` replies."""
        super().__init__("no_more_replies", f"the model cannot reply any more ({reason})", reason=reason)
        self.reason = reason


class Say(msgspec.Struct, frozen=True, tag="say"):
    """Asks for a reply."""

    parent: int | None
    """The reply that the messages follow; None begins a conversation."""
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    parse: bool
    """Whether tool calls and reasoning are parsed."""
    reward: float | None
    """The rollout's reward so far."""


class LeaveOut(msgspec.Struct, frozen=True, tag="leave_out"):
    """Excludes a reply from the loss."""

    turn: int


class End(msgspec.Struct, frozen=True, tag="end"):
    """The rollout has ended, and the environment is about to be closed."""

    reward: float | None
    over: dict[int, str] = {}
    """The reasons why conversations could not go on, by their last replies."""
    failure: Failed | None = None


class Over(msgspec.Struct, frozen=True, tag="over"):
    """No reply: there is no room for one."""

    reason: str


class Noted(msgspec.Struct, frozen=True, tag="noted"):
    """The answer to what needs none."""


Asked = Say | LeaveOut | End
Answer = Reply | Over | Noted
Asking = Callable[[Asked], Awaitable[Answer]]
"""Asks the service. Raises EnvError."""


class Talk:
    """What the conversations of one rollout share, and the clock of the environment's methods."""

    def __init__(self, ask: Asking, name: EnvironmentName, limit: float) -> None:
        """`limit`: seconds that a method may take between two replies of the model."""
        self.ask, self.name, self.limit = ask, name, limit
        self.method = "__init__"
        """The method that runs."""
        self.max_turns = 1
        self.replies = 0
        self.over: dict[int, str] = {}
        self.reward: float | None = None
        self._bound: asyncio.Timeout | None = None
        self._saying = 0

    @property
    def place(self) -> str:
        """The running method, for messages."""
        return f"{self.name}.{self.method}"

    async def in_time(self, playing: asyncio.Task[Any]) -> bool:
        """Waits for the task. Returns False as soon as a method exceeds the limit."""
        try:
            async with asyncio.timeout(self.limit) as self._bound:
                await asyncio.wait({playing})
        except TimeoutError:
            return False
        finally:
            self._bound = None
        return True

    async def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Calls `reset` or `step`, with a time limit of its own."""
        self.method = method.__name__
        self.pause(0)
        return await run(method, *arguments)

    def pause(self, waiting: int) -> None:
        """Restarts the clock, which stands while the environment waits for the model. `waiting`: replies, more or
        fewer than before."""
        self._saying += waiting
        if self._bound is not None:
            until = asyncio.get_running_loop().time() + self.limit
            self._bound.reschedule(None if self._saying else until)


class Model:
    """A conversation with the model in training. It begins empty."""

    def __init__(self, talk: Talk, at: Reply | None = None, tools: Sequence[dict[str, Any]] = ()) -> None:
        """`at`: the reply after which the conversation continues."""
        self.talk, self._at, self._tools = talk, at, list(tools)
        self._saying = False

    async def say(self, messages: str | Message | Sequence[Message] = (), tools: Sequence[Tool] | None = None) -> Reply:
        """Adds messages to the conversation and returns the model's reply to them.

        `messages`: text of the user, one message, or a list of messages. `tools`: JSON schemas in OpenAI's form, or
        functions with type hints and a docstring; None: the tools of the conversation so far.

        Raises NoMoreRepliesError; EpisodeError for messages that are none, or while another `say` of this conversation
        runs. An error of the model servers fails the rollout, whatever the caller does with it.
        """
        if tools is not None:
            self._tools = [schema_of(tool) if callable(tool) else dict(tool) for tool in tools]
        return await self.reply_to(messages, parse=True)

    async def reply_to(self, messages: str | Message | Sequence[Message], *, parse: bool) -> Reply:
        """Does what `say` does with the tools so far. `parse`: whether reasoning and tool calls are parsed."""
        talk, at = self.talk, self._at
        sent = said_messages(talk.name, messages)
        if self._saying:
            raise EpisodeError(
                "conversation_busy",
                f"{talk.name}: a conversation has one reply at a time; model.fork() gives another conversation that "
                "continues from the same place",
            )
        if at is None and not sent:
            raise EpisodeError("environment_value", f"{talk.name}.play says nothing at the beginning of a conversation")
        if at is not None and at.finish_reason == "length":
            self._end("length")
        if talk.replies >= talk.max_turns:
            self._end("turns")
        talk.replies += 1
        self._saying = True
        talk.pause(1)
        try:
            parent = None if at is None else at.turn
            said = await talk.ask(Say(parent, sent, self._tools, parse, talk.reward))
        finally:
            self._saying = False
            talk.pause(-1)
        if isinstance(said, Over):
            talk.replies -= 1
            self._end(said.reason)
        assert isinstance(said, Reply)
        self._at = said
        return said

    def fork(self) -> Self:
        """Returns a conversation that continues after the last reply of this one: a branch of the rollout."""
        return type(self)(self.talk, self._at, self._tools)

    def fresh(self) -> Self:
        """Returns another conversation of the rollout that begins empty, for example for a sub-agent."""
        return type(self)(self.talk)

    async def leave_out(self, reply: Reply) -> None:
        """Excludes a reply from the loss. It stays in the conversation."""
        await self.talk.ask(LeaveOut(reply.turn))

    @property
    def reward(self) -> float | None:
        """The rollout's reward if it ends before `play` returns: no room is left, or its time is over."""
        return self.talk.reward

    @reward.setter
    def reward(self, reward: float | None) -> None:
        self.talk.reward = checked_reward(self.talk.name, "reward", reward)

    def _end(self, reason: str) -> None:
        if self._at is not None:
            self.talk.over[self._at.turn] = reason
        raise NoMoreRepliesError(reason)
