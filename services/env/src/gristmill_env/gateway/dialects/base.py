"""The data that the gateway reads from and writes to clients of any API, and parts of messages that the APIs share."""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from gristmill_env.data import Message, object_of
from gristmill_env.values import half_characters, json_or_none

JsonObject = dict[str, Any]


class RequestError(Exception):
    """A request that the gateway refuses."""

    def __init__(self, status: int, code: str, message: str, field: str | None = None) -> None:
        """`field`: the field of the request that is refused."""
        super().__init__(message)
        self.status, self.code, self.field = status, code, field


_CALL = {"name", "parameters"}


@dataclass(frozen=True)
class Constraint:
    """Fields of a request with which the model samples from another distribution than the one that is trained."""

    fields: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The same as fields of vLLM's sampling parameters."""
    tool: str | None = None
    """The tool whose arguments the reply must be."""
    tools: bool = False
    """Whether the reply must be a list of calls: [{"name", "parameters"}]."""

    def calls(self, text: str) -> list[JsonObject]:
        """Returns a reply's tool calls in OpenAI's form; none if it was cut, or if the constraint is not about tools.

        `text`: the reply, without the tokens that end it.
        """
        if self.tool is None and not self.tools:
            return []
        named = json_or_none(text)
        if self.tool is not None and named is not None:
            named = [{"name": self.tool, "parameters": named}]
        if not isinstance(named, list) or not all(isinstance(call, dict) and call.keys() == _CALL for call in named):
            return []  # the server has ignored the constraint
        return [
            {
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["parameters"], ensure_ascii=False)},
            }
            for call in named
        ]


@dataclass(frozen=True)
class ChatRequest:
    """A request of any dialect."""

    messages: tuple[Message, ...]
    """In the form of chat templates: text as `content`, and the arguments of tool calls as objects."""
    tools: tuple[JsonObject, ...] = ()
    """In OpenAI's form: {"type": "function", "function": {"name", "description", "parameters"}}."""
    calls: bool = True
    """Whether the reply may have tool calls: `tool_choice` is not none. The prompt has the tools in any case."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    parallel_tool_calls: bool = True
    stream: bool = False
    with_usage: bool = True
    """Whether a stream ends with the numbers of tokens."""
    constraint: Constraint = field(default_factory=Constraint)


@dataclass(frozen=True)
class Reply:
    """The model's answer."""

    id: str
    model: str
    message: JsonObject
    """In OpenAI's form: `content`, and if there are any, `reasoning` and `tool_calls` with `arguments` as text."""
    finish_reason: str
    """ "stop", "length" or "tool_calls"."""
    prompt_tokens: int
    completion_tokens: int
    stop_text: str | None = None
    """The text of the request's `stop` that ended the answer."""
    number: int = 0
    """The answer's place in the order of the rollout's replies."""

    @property
    def text(self) -> str:
        return self.message.get("content") or ""

    @property
    def calls(self) -> Sequence[JsonObject]:
        return self.message.get("tool_calls") or ()


class Dialect(ABC):
    """One API."""

    keep_alive: ClassVar[bytes] = b": keep-alive\n\n"
    """Sent while the model works on a streamed answer."""

    @abstractmethod
    def read(self, body: JsonObject) -> ChatRequest:
        """Reads a request. Raises RequestError."""

    @abstractmethod
    def answer(self, reply: Reply) -> JsonObject:
        """Returns the whole answer."""

    @abstractmethod
    def events(self, reply: Reply, request: ChatRequest) -> Iterator[bytes]:
        """Yields the answer as server-sent events."""

    @abstractmethod
    def error(self, error: RequestError) -> JsonObject:
        """Returns the body of a refusal."""

    def error_event(self, error: RequestError) -> bytes:
        """Returns a refusal after the stream has begun."""
        return event(self.error(error))


def event(data: JsonObject | str, name: str | None = None) -> bytes:
    """Returns one server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


def template_message(message: Mapping[str, Any]) -> Message:
    """Returns a message of OpenAI's form in the form of chat templates: a reply as it was answered, sent back by a
    client, gives the same. Raises RequestError.
    """
    role = message.get("role")
    if role == "developer":
        role = "system"
    if role not in {"system", "user", "assistant", "tool"}:
        raise invalid(f"a message has the role {role!r}; known are system, user, assistant and tool", "messages")
    between = "" if role == "assistant" else "\n"  # as vLLM joins the parts
    whole: JsonObject = {"role": role, "content": text_of_content(message.get("content"), between)}
    if calls := message.get("tool_calls"):
        whole["tool_calls"] = [_template_call(call) for call in calls]
    for key in ("name", "tool_call_id"):
        if message.get(key) is not None:
            whole[key] = message[key]
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if reasoning:
        whole["reasoning_content"] = reasoning
    if (path := next(half_characters(whole), None)) is not None:
        raise invalid(f"'{path}' of a message holds half a character (half of a surrogate pair)", "messages")
    return whole


def error_kind(error: RequestError) -> str:
    if error.status in {401, 403}:
        return "authentication_error"
    return "invalid_request_error" if error.status < 500 else "api_error"


def invalid(message: str, field: str) -> RequestError:
    return RequestError(400, "bad_request", message, field)


def unsupported(field: str, remedy: str) -> RequestError:
    return RequestError(400, "not_supported", f"'{field}' is not supported: {remedy}", field)


def constraint(
    tools: Sequence[JsonObject],
    choice: object,
    form: object,
    more: Mapping[str, Any],
    form_field: str,
    *,
    parallel: bool,
) -> Constraint:
    """Returns a request's constraint. Raises RequestError.

    `choice`: "required" for a call of any tool, the name of a tool as {"name"}, or None. `form`: the form of the
    reply, {"type": "json_object"} or {"type": "json_schema", "schema"}, or None. `more`: fields that vLLM's sampling
    parameters have too. `form_field`: the name of the form in this API. `parallel`: whether a reply may have several
    calls.
    """
    fields = [name for name, value in more.items() if value]
    sampling = {name: value for name, value in more.items() if value}
    name = None
    if choice is not None:
        fields.append("tool_choice")
        functions = {tool["function"]["name"]: tool["function"] for tool in tools}
        name = choice.get("name") if isinstance(choice, dict) else None
        if not functions or (choice != "required" and name not in functions):
            raise invalid("'tool_choice' must be auto, none, required, or one of the request's tools", "tool_choice")
        schema = _arguments(functions[name]) if name is not None else _calls(list(functions.values()), parallel)
        sampling["structured_outputs"] = {"json": schema}
    kind = form.get("type", "text") if isinstance(form, dict) else "text"
    if kind != "text":
        if "structured_outputs" in sampling or kind not in ("json_object", "json_schema"):
            raise unsupported(form_field, "ask for one form of the reply: json_object, json_schema or a tool")
        assert isinstance(form, dict)
        fields.append(form_field)
        wanted = form.get("schema")
        if kind == "json_schema" and not isinstance(wanted, dict):
            raise invalid(f"'{form_field}' has no schema", form_field)
        sampling["structured_outputs"] = {"json": wanted} if kind == "json_schema" else {"json_object": True}
    return Constraint(tuple(fields), sampling, name, choice is not None and name is None)


def _arguments(function: JsonObject) -> JsonObject:
    return function.get("parameters") or {"type": "object", "properties": {}}


def _calls(functions: Sequence[JsonObject], parallel: bool) -> JsonObject:
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, "parameters": _arguments(function)},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    most = {} if parallel else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}}


def read_messages(given: object) -> tuple[Message, ...]:
    if not isinstance(given, list) or not given or not all(isinstance(message, dict) for message in given):
        raise invalid("'messages' must be a list of at least one message", "messages")
    return tuple(template_message(message) for message in given)


def text_of_content(content: object, between: str = "") -> str:
    """Returns the text of a message's content: text, null, or a list of text parts. `between`: joins the parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = []
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else part
            if not isinstance(text, str):
                raise invalid(
                    f"a part of type {kind!r} of a message is not text; the model reads text only", "messages"
                )
            parts.append(text)
        return between.join(parts)
    raise invalid("the content of a message must be text, null or a list of text parts", "messages")


def _template_call(call: Any) -> JsonObject:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid("a tool call must be {id, type: function, function: {name, arguments}}", "messages")
    arguments = function.get("arguments")
    named = {
        "name": function["name"],
        "arguments": object_of(arguments) if isinstance(arguments, str) else arguments or {},
    }
    return {"id": call.get("id"), "type": "function", "function": named}


def function_tool(tool: Any) -> JsonObject:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid("a tool must be {type: function, function: {name, description, parameters}}", "tools")
    if function.get("strict"):
        function = {key: value for key, value in function.items() if key != "strict"}
    return {"type": "function", "function": function}


def read_count(body: JsonObject, field: str) -> int | None:
    value = body.get(field)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise invalid(f"'{field}' must be a whole number of at least 1", field)
    return value


def read_stop(body: JsonObject, field: str) -> tuple[str, ...]:
    value = body.get(field) or ()
    texts = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(text, str) and text for text in texts):
        raise invalid(f"'{field}' must be text or a list of texts", field)
    return texts
