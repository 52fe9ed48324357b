"""Environments whose task is to use tools: functions, or the methods of a class in the shape of TRL's environments.

The loop: a reply, its calls, a reply to their results, until a reply has no calls. What is wrong with a call (an
unknown tool, wrong arguments, an exception of the tool) becomes the result, so that the model learns from it.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from gristmill.internal.plugins import load_plugin
from gristmill_env.data import Item, Message
from gristmill_env.environments.base import Environment
from gristmill_env.environments.functions import ArgumentsError, checked_arguments, result_text, schema_of
from gristmill_env.environments.model import Model, NoMoreRepliesError, ToolCall
from gristmill_env.environments.returned import EnvironmentName
from gristmill_env.errors import EnvError, EpisodeError
from gristmill_env.gather import gather
from gristmill_env.outages import may_pass
from gristmill_env.running.host import run
from gristmill_env.values import message_of

_LONGEST_ERROR = 1000
"""Characters of an exception's text in a message."""


class ToolLoop(Environment, ABC):
    """Replies and tool calls in turn."""

    runs_user_code = True
    one_after_another: ClassVar[bool] = False
    """Whether the calls of one reply share state. Otherwise they run at the same time."""

    async def play(self, item: Item, model: Model) -> float | None:
        """Plays until a reply calls no tool, no room is left or `max_turns` is reached."""
        messages: Sequence[Message] = await self.begin(item)
        tools = {tool.__name__: tool for tool in self.tools()}
        schemas = [schema_of(tool) for tool in tools.values()]
        try:
            reply = await model.say(messages, tools=schemas)
            while reply.tool_calls:
                reply = await model.say(await self._results(reply.tool_calls, tools))
        except NoMoreRepliesError:
            pass  # truncated, and scored like any other rollout
        return await self.score()

    @abstractmethod
    async def begin(self, item: Item) -> Sequence[Message]:
        """Returns the messages for the model to answer first."""

    @abstractmethod
    def tools(self) -> Sequence[Callable[..., Any]]:
        """Returns the tools."""

    @abstractmethod
    async def score(self) -> float | None:
        """Returns the rollout's reward."""

    async def _results(
        self, calls: Sequence[ToolCall], tools: Mapping[str, Callable[..., Any]]
    ) -> list[dict[str, Any]]:
        results = [_result(call, tools) for call in calls]
        texts = [await result for result in results] if self.one_after_another else await gather(results)
        return [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}
            for call, text in zip(calls, texts, strict=True)
        ]


class Tools(ToolLoop):
    """The row's prompt, and functions as tools. The reward is that of `reward_functions`."""

    def __init__(
        self,
        *,
        tools: Annotated[list[str], Field(min_length=1)],
        max_turns: Annotated[int, Field(ge=1)] = 8,
        folder: Path | None = None,
    ) -> None:
        """`tools`: functions, as path/to/file.py:name or package.module:name, relative to `folder`."""
        self.max_turns = max_turns  # type: ignore[misc]
        self._functions = [load_plugin(name, folder) for name in tools]

    def check(self) -> None:
        """Raises EpisodeError for what cannot be a tool."""
        for function in self._functions:
            if not callable(function):
                raise EpisodeError("not_a_tool", f"{function!r:.80} is not a tool; a tool is a function")
            schema_of(function)

    async def begin(self, item: Item) -> Sequence[Message]:
        """Returns the row's messages."""
        return item.messages

    def tools(self) -> Sequence[Callable[..., Any]]:
        """Returns the functions."""
        return self._functions

    async def score(self) -> float | None:
        """Returns None."""
        return None


class ToolObject(ToolLoop):
    """An object in the shape of TRL's `environment_factory`: `reset(**row)`, and its other public methods are tools.

    `reset` returns None or text, which is appended to the row's last message. `get_reward()`, if there is one, returns
    the rollout's reward.
    """

    made_of: ClassVar[type]
    one_after_another = True

    def __init__(self, **options: Any) -> None:
        self._object = self.made_of(**options)

    async def begin(self, item: Item) -> Sequence[Message]:
        """Calls `reset` with the row's columns."""
        observation = await run(self._object.reset, **item.columns)
        if observation is None:
            return item.messages
        if not isinstance(observation, str):
            name = EnvironmentName(self.made_of.__name__, item.index)
            raise name.wrong("reset", "returned", observation, "None or text")
        *before, last = item.messages
        return [*before, {**last, "content": last["content"] + observation}]

    def tools(self) -> Sequence[Callable[..., Any]]:
        """Returns the object's public methods, in the order of their names as in TRL."""
        members = inspect.getmembers(self.made_of, predicate=inspect.isfunction)
        names = [name for name, _ in members if not name.startswith("_") and name not in _NO_TOOLS]
        return [getattr(self._object, name) for name in names]

    async def score(self) -> float | None:
        """Returns the value of `get_reward`."""
        if not hasattr(self._object, "get_reward"):
            return None
        reward: float | None = await run(self._object.get_reward)
        return reward

    async def close(self) -> None:
        """Closes the object, if it has a `close`."""
        if hasattr(self._object, "close"):
            await run(self._object.close)


_NO_TOOLS = ("reset", "get_reward", "close")


def is_tool_class(kind: object) -> bool:
    """Returns whether a class has the shape of TRL's environments."""
    return isinstance(kind, type) and not issubclass(kind, Environment) and callable(getattr(kind, "reset", None))


def tool_environment(kind: type) -> type[ToolObject]:
    """Returns the environment of a class in the shape of TRL's. Its `max_turns` is the class' own, or 16."""
    turns = getattr(kind, "max_turns", ToolObject.max_turns)
    made = {"made_of": kind, "max_turns": turns, "__module__": kind.__module__}
    return type(kind.__name__, (ToolObject,), made)


async def _result(call: ToolCall, tools: Mapping[str, Callable[..., Any]]) -> str:
    """Runs a call. Returns its result, or what is wrong with it.

    Raises an error of the tool that may pass, or that is Gristmill's own, such as a sandbox that does not start.
    """
    tool = tools.get(call.name)
    if tool is None:
        return f"Error: there is no tool {call.name}; there are {', '.join(tools)}"
    try:
        arguments = checked_arguments(tool, call.arguments)
    except ArgumentsError as error:
        return f"Error: {error}"
    try:
        return result_text(await run(tool, **arguments))
    except (Exception, SystemExit) as error:
        if may_pass(error) or isinstance(error, EnvError):
            raise
        return f"Error: {type(error).__name__}: {message_of(error)}"[:_LONGEST_ERROR]
