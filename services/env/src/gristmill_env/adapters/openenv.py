"""OpenEnv 0.10: a server of environments, which plays each rollout on a separate WebSocket connection.

The server's /schema has the form of an action. It decides how the model acts: by its text, or by a call of a tool.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import httpx
import msgspec
from pydantic import Field, SecretStr
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidMessage, WebSocketException

from gristmill.internal import connections
from gristmill.internal.redaction import redact_text
from gristmill_env.data import Item, Message, user
from gristmill_env.data.dataset import NoFieldError, lookup
from gristmill_env.environments.base import Environment
from gristmill_env.environments.functions import result_text
from gristmill_env.environments.model import Model, Reply, ToolCall
from gristmill_env.environments.returned import EnvironmentName, checked_reward
from gristmill_env.errors import EpisodeError
from gristmill_env.outages import may_pass
from gristmill_env.settings.servers import Url
from gristmill_env.values import is_storable, whole

_MOST_BYTES: Final = 4 << 20
"""Of a message of the server, and of its schema."""
_OPEN_S: Final = 30.0
_GOES_AWAY: Final = (1001, 1006, 1012, 1013, 1014)
"""Codes of closed connections: the server ends, restarts or is lost."""
_TOO_BIG: Final = 1009
_LONGEST: Final = 1000
"""Characters of a text of the server in a message."""


class OpenEnv(Environment):
    """One rollout at an OpenEnv server. Its reward is the sum of the rewards of its steps."""

    def __init__(
        self,
        *,
        base_url: Url,
        action: Literal["auto", "text", "json", "tool", "mcp"] = "auto",
        observation: str | None = None,
        reset: list[str] = [],  # noqa: B006  read only
        max_turns: Annotated[int, Field(ge=1)] = 16,
        api_key: SecretStr | None = None,
    ) -> None:
        """`action`: the part of a reply that acts. `observation`: the field of an observation that the model reads;
        None: its only field, or all fields as JSON. `reset`: columns of the row that `reset` receives."""
        self.max_turns = max_turns  # type: ignore[misc]
        self._url, self._action, self._shown, self._reset_columns = base_url, action, observation, reset
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key.get_secret_value()}"}

    async def play(self, item: Item, model: Model) -> float | None:
        name = model.talk.name
        style = _Style.of(name, self._action, await _schema(name, self._url, self._headers))
        rewarded = False
        async with _connected(name, self._url, self._headers) as server:
            begun = await server.observe("reset", self._reset(name, item))
            if begun.done:
                raise name.wrong("reset", "returned done =", True, "False: a rollout has at least one action")
            tools = await server.tools() if style.kind == "mcp" else style.tools
            model.reward = 0.0
            messages: Sequence[Message] = _opening(item, self._text(name, "reset", begun))
            reply = await model.say(messages, tools=tools)
            while acts := style.actions(reply):
                results = []
                for call, action in acts:
                    try:
                        if isinstance(action, str):
                            raise _RefusedError(action)
                        seen = await server.observe("step", action)
                    except _RefusedError as refused:
                        results.append(_result(call, f"Error: {refused}"))
                        continue
                    reward = checked_reward(name, "step", seen.reward)
                    rewarded = rewarded or reward is not None
                    model.reward += reward or 0.0
                    if seen.done:
                        return model.reward if rewarded else None
                    results.append(_result(call, self._text(name, "step", seen)))
                reply = await model.say(results)
        return model.reward

    def _reset(self, name: EnvironmentName, item: Item) -> dict[str, Any]:
        """Returns the arguments of `reset`. All rollouts of a group have the same."""
        for column in self._reset_columns:
            if column not in item.columns or not is_storable(item.columns[column]):
                columns = ", ".join(map(str, item.columns))
                found = item.columns.get(column)
                raise name.wrong("reset", f"receives {column} =", found, f"a column ({columns}) that JSON can hold")
        return {"seed": item.row, **{column: item.columns[column] for column in self._reset_columns}}

    def _text(self, name: EnvironmentName, method: str, observed: _Observed) -> str:
        """Returns what the model reads of an observation."""
        fields = {key: value for key, value in observed.observation.items() if key != "metadata"}
        if self._shown is not None:
            try:
                return result_text(lookup(observed.observation, self._shown))
            except NoFieldError as error:
                raise name.wrong(method, "returned", observed.observation, f"with a field {self._shown}") from error
        if "tool_name" in fields and "result" in fields:
            return _tool_text(fields)
        return result_text(next(iter(fields.values())) if len(fields) == 1 else fields)


class _Observed(msgspec.Struct, frozen=True):
    observation: dict[str, Any]
    reward: Any = None
    done: bool = False


class _Said(msgspec.Struct, frozen=True):
    """A message of the server."""

    type: str
    data: dict[str, Any]


class _Problem(msgspec.Struct, frozen=True):
    """The data of an error."""

    message: str = ""
    code: str = ""
    errors: list[Any] = []


class _RefusedError(Exception):
    """The action is not valid. The model reads why."""


class _Server:
    """The connection of one rollout."""

    def __init__(self, name: EnvironmentName, url: str, socket: ClientConnection) -> None:
        self._name, self._url, self._socket = name, url, socket

    async def observe(self, method: str, data: Mapping[str, Any]) -> _Observed:
        """Sends `reset` or `step`. Raises EpisodeError, and _RefusedError for an action that is not valid."""
        try:
            with contextlib.suppress(ConnectionClosed):  # before it closes, a full server says so
                await self._socket.send(json.dumps({"type": method, "data": data}))
            received = await self._socket.recv()
        except ConnectionClosed as error:
            raise self._closed(method, error) from None
        try:
            said = msgspec.json.decode(received, type=_Said)
            if said.type == "error":
                raise self._error(method, msgspec.convert(said.data, _Problem))
            if said.type == "observation":
                return msgspec.convert(said.data, _Observed)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:  # a ValidationError is a DecodeError
            raise self._name.wrong(method, "received", received, f"an observation of OpenEnv ({error})") from error
        raise self._name.wrong(method, "received", received, "a message of the type observation")

    async def tools(self) -> list[dict[str, Any]]:
        """Returns the tools of an MCP environment in OpenAI's form."""
        listed = (await self.observe("step", {"type": "list_tools"})).observation.get("tools")
        try:
            tools = msgspec.convert(listed, list[_McpTool])
        except msgspec.ValidationError as error:
            raise self._name.wrong("list_tools", "returned", listed, f"a list of tools ({error})") from error
        return [_tool(tool.name, tool.description, tool.input_schema) for tool in tools]

    def _error(self, method: str, problem: _Problem) -> Exception:
        text = redact_text(whole(problem.message[:_LONGEST]))
        if problem.code == "VALIDATION_ERROR" and method == "step":
            found = (f"{one.get('loc')}: {one.get('msg')}" for one in problem.errors if isinstance(one, Mapping))
            return _RefusedError(whole("; ".join([text, *found])[:_LONGEST]))
        where = f"{self._name}.{method}: the server at {redact_text(self._url)}"
        if problem.code == "CAPACITY_REACHED":
            return EpisodeError(
                "openenv_full", f"{where} has no free environment ({text}); raise its max_concurrent_envs",
                method=f"{self._name}.{method}", url=self._url,
            ).passing()  # fmt: skip
        return EpisodeError(
            "openenv_error", f"{where} answers {problem.code}: {text}",
            method=f"{self._name}.{method}", error=problem.code, row=self._name.row,
        )  # fmt: skip

    def _closed(self, method: str, closed: ConnectionClosed) -> EpisodeError:
        code = 1006 if closed.rcvd is None and closed.sent is None else (closed.rcvd or closed.sent).code  # type: ignore[union-attr]
        why = f"a message above {_MOST_BYTES} bytes" if code == _TOO_BIG else f"code {code}"
        return EpisodeError(
            "openenv_closed",
            f"{self._name}.{method}: the connection to {redact_text(self._url)} is closed ({why})",
            method=f"{self._name}.{method}", close_code=int(code), url=self._url,
        ).passing(code in _GOES_AWAY)  # fmt: skip


class _McpTool(msgspec.Struct, frozen=True):
    name: str
    description: str
    input_schema: dict[str, Any]


class _Style(msgspec.Struct, frozen=True):
    """How a reply becomes actions."""

    kind: str
    field: str = ""
    tools: list[dict[str, Any]] = []

    @classmethod
    def of(cls, name: EnvironmentName, kind: str, action: Mapping[str, Any]) -> _Style:
        """`action`: the JSON schema of an action. Raises EpisodeError if an action has not the fields for `kind`."""
        fields = {key: value for key, value in action["properties"].items() if key != "metadata"}
        needed = [key for key in action.get("required", []) if key in fields] or list(fields)
        texts = [key for key in needed if isinstance(fields[key], Mapping) and fields[key].get("type") == "string"]
        if kind == "auto":
            mcp = not fields or {"tool_name", "arguments"} <= set(fields)
            kind = "mcp" if mcp else "text" if len(needed) == len(texts) == 1 else "tool"
        if kind == "text":
            if len(texts) != 1 or len(needed) != 1:
                raise name.wrong("action", "has the fields", needed, "one text, for action: text")
            return cls(kind, field=texts[0])
        if kind == "tool":
            schema = {key: value for key, value in action.items() if key not in ("title", "description")}
            text = action.get("description") or "Acts in the environment."
            return cls(kind, tools=[_tool("act", str(text), {**schema, "properties": fields})])
        return cls(kind)

    def actions(self, reply: Reply) -> list[tuple[ToolCall | None, dict[str, Any] | str]]:
        """Returns the calls and their actions; a text says what is wrong with one. Empty: the model has ended."""
        if self.kind == "text":
            return [(None, {self.field: reply.answer})]
        if self.kind == "json":
            return [(None, _json(reply.answer))]
        parsed: list[tuple[ToolCall | None, dict[str, Any] | str]] = []
        for call in reply.tool_calls:
            if call.arguments is None:
                parsed.append((call, "the arguments are not a JSON object"))
            elif self.kind == "mcp":
                parsed.append((call, {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}))
            else:
                parsed.append((call, call.arguments if call.name == "act" else "there is only the tool act"))
        return parsed


@contextlib.asynccontextmanager
async def _connected(name: EnvironmentName, url: str, headers: Mapping[str, str]) -> AsyncIterator[_Server]:
    try:
        # step_timeout limits the wait for an answer, so a ping needs no limit: a server may block its loop in a step.
        socket = await connect(
            f"ws{url.removeprefix('http')}/ws", additional_headers=headers, proxy=connections.proxy_for(url),
            max_size=_MOST_BYTES, open_timeout=_OPEN_S, close_timeout=1, ping_timeout=None,
        )  # fmt: skip
    except (OSError, WebSocketException) as error:
        raise _unreachable(name, url, error) from error
    async with socket:
        yield _Server(name, url, socket)


async def _schema(name: EnvironmentName, url: str, headers: Mapping[str, str]) -> dict[str, Any]:
    """Returns the JSON schema of an action."""
    body = b""
    try:
        http = connections.async_client(url, timeout=_OPEN_S, headers=headers)
        async with http, http.stream("GET", "/schema") as answer:
            answer.raise_for_status()
            async for part in answer.aiter_bytes():
                body += part
                if len(body) > _MOST_BYTES:
                    raise name.wrong("schema", "received", body[:80], f"at most {_MOST_BYTES} bytes")
    except httpx.HTTPError as error:
        raise _unreachable(name, url, error) from error
    try:
        action = msgspec.json.decode(body, type=dict[str, Any])["action"]
        msgspec.convert(action, _ActionSchema)
    except (KeyError, ValueError) as error:
        raise name.wrong("schema", "received", body, f"OpenEnv's schemas ({error})") from error
    schema: dict[str, Any] = action
    return schema


class _ActionSchema(msgspec.Struct, frozen=True):
    properties: dict[str, dict[str, Any]]
    required: list[str] = []


def _unreachable(name: EnvironmentName, url: str, why: Exception) -> EpisodeError:
    without_password = redact_text(url)
    text = f"{name}: no connection to the OpenEnv server at {without_password}: {type(why).__name__}: {why}"
    error = EpisodeError("openenv_unreachable", redact_text(text[:_LONGEST]), url=without_password)
    return error.passing(isinstance(why, InvalidMessage) or may_pass(why))


def _opening(item: Item, text: str) -> list[Message]:
    """Returns the row's messages, of which the last also has the first observation."""
    *before, last = item.messages
    return [*before, {**last, "content": "\n\n".join(filter(None, (last["content"], text)))}]


def _tool(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _result(call: ToolCall | None, text: str) -> Message:
    return user(text) if call is None else {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}


def _tool_text(fields: Mapping[str, Any]) -> str:
    """Returns the result of a tool of an MCP environment, or its error."""
    error, result = fields.get("error"), fields["result"]
    if error:
        return f"Error: {error.get('message') if isinstance(error, Mapping) else error}"
    content = result.get("content") if isinstance(result, Mapping) else None
    parts = content if isinstance(content, list) else []
    texts = [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    return "\n".join(texts) if texts else result_text(result)


def _json(text: str) -> dict[str, Any] | str:
    """Returns the JSON object of a reply, also from a block of code; or the text of an error."""
    text = text.strip().removeprefix("```json").removeprefix("```").removesuffix("```")
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except ValueError as error:
        return f"the reply is not a JSON object: {error}"
