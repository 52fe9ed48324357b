"""What clients say and expect: OpenAI's Chat Completions and Responses, and Anthropic's Messages.

A dialect reads a request as `ChatRequest`, whose messages have the form of chat templates, and writes a `Reply` as one
JSON object or as server-sent events. An answer is complete before its first event is written, because a tool parser
needs the whole text.
"""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from gristmill_env.data import Message
from gristmill_env.values import half_characters

JsonObject = dict[str, Any]


class RequestError(Exception):
    """A request that the gateway refuses."""

    def __init__(self, status: int, code: str, message: str, field: str | None = None) -> None:
        """`field`: the field of the request that is refused."""
        super().__init__(message)
        self.status, self.code, self.field = status, code, field


@dataclass(frozen=True)
class ChatRequest:
    """A request of any dialect."""

    messages: tuple[Message, ...]
    """In the form of chat templates: text as `content`, and the arguments of tool calls as objects."""
    tools: tuple[JsonObject, ...] = ()
    """In OpenAI's form: {"type": "function", "function": {"name", "description", "parameters"}}."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    parallel_tool_calls: bool = True
    stream: bool = False
    with_usage: bool = True
    """Whether a stream ends with the numbers of tokens."""


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
        raise _invalid(f"a message has the role {role!r}; known are system, user, assistant and tool", "messages")
    whole: JsonObject = {"role": role, "content": _text(message.get("content"))}
    if calls := message.get("tool_calls"):
        whole["tool_calls"] = [_template_call(call) for call in calls]
    for key in ("name", "tool_call_id"):
        if message.get(key) is not None:
            whole[key] = message[key]
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if reasoning:
        whole["reasoning_content"] = reasoning
    if (path := next(half_characters(whole), None)) is not None:
        raise _invalid(f"'{path}' of a message holds half a character (half of a surrogate pair)", "messages")
    return whole


class ChatCompletions(Dialect):
    """OpenAI's POST /v1/chat/completions."""

    def read(self, body: JsonObject) -> ChatRequest:
        _refuse_other_distributions(body)
        if body.get("logprobs"):
            raise _unsupported("logprobs", "the gateway keeps log-probabilities for the training itself")
        choice = body.get("tool_choice")
        tools = [] if choice == "none" else body.get("tools") or []
        options = body.get("stream_options") or {}
        return ChatRequest(
            messages=_messages(body.get("messages")),
            tools=tuple(_tool(tool) for tool in tools),
            max_tokens=_count(body, "max_completion_tokens") or _count(body, "max_tokens"),
            stop=_stop(body, "stop"),
            parallel_tool_calls=body.get("parallel_tool_calls") is not False,
            stream=bool(body.get("stream")),
            with_usage=bool(options.get("include_usage")),
        )

    def answer(self, reply: Reply) -> JsonObject:
        message = {"role": "assistant", "content": None, **reply.message}
        choice = {"index": 0, "message": message, "finish_reason": reply.finish_reason, "logprobs": None}
        return {**self._head(reply, "chat.completion"), "choices": [choice], "usage": _usage(reply)}

    def events(self, reply: Reply, request: ChatRequest) -> Iterator[bytes]:
        head = self._head(reply, "chat.completion.chunk")

        def chunk(delta: JsonObject, finish: str | None = None) -> bytes:
            return event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

        yield chunk({"role": "assistant", "content": ""})
        if reasoning := reply.message.get("reasoning"):
            yield chunk({"reasoning": reasoning})
        if reply.text:
            yield chunk({"content": reply.text})
        for index, call in enumerate(reply.calls):
            yield chunk({"tool_calls": [{"index": index, **call}]})
        yield chunk({}, reply.finish_reason)
        if request.with_usage:
            yield event({**head, "choices": [], "usage": _usage(reply)})
        yield event("[DONE]")

    def error(self, error: RequestError) -> JsonObject:
        return {"error": {"message": str(error), "type": _kind(error), "param": error.field, "code": error.code}}

    def _head(self, reply: Reply, what: str) -> JsonObject:
        return {"id": f"chatcmpl-{reply.id}", "object": what, "created": int(time.time()), "model": reply.model}


class Responses(ChatCompletions):
    """OpenAI's POST /v1/responses."""

    def read(self, body: JsonObject) -> ChatRequest:
        _refuse_other_distributions(body)
        form = (body.get("text") or {}).get("format") or {}
        if form.get("type", "text") != "text":
            raise _other_distribution("text.format")
        for field in ("previous_response_id", "conversation"):
            if body.get(field):
                raise _unsupported(field, "send the whole conversation as `input`")
        given = body.get("input")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        if not isinstance(items, list) or not items:
            raise _invalid("'input' must be text or a list of items", "input")
        messages = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
        tools = [] if body.get("tool_choice") == "none" else body.get("tools") or []
        return ChatRequest(
            messages=_messages([*messages, *_joined_items(items)]),
            tools=tuple(_flat_tool(tool) for tool in tools),
            max_tokens=_count(body, "max_output_tokens"),
            parallel_tool_calls=body.get("parallel_tool_calls") is not False,
            stream=bool(body.get("stream")),
        )

    def answer(self, reply: Reply) -> JsonObject:
        cut = reply.finish_reason == "length"
        return {
            **self._begun(reply),
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._items(reply),
            "usage": {
                "input_tokens": reply.prompt_tokens,
                "output_tokens": reply.completion_tokens,
                "total_tokens": reply.prompt_tokens + reply.completion_tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens_details": {"reasoning_tokens": 0},
            },
        }

    def events(self, reply: Reply, request: ChatRequest) -> Iterator[bytes]:
        numbers = iter(range(1_000_000))

        def named(kind: str, **fields: Any) -> bytes:
            return event({"type": kind, "sequence_number": next(numbers), **fields}, kind)

        yield named("response.created", response=self._begun(reply))
        yield named("response.in_progress", response=self._begun(reply))
        for index, item in enumerate(self._items(reply)):
            at = {"output_index": index, "item_id": item["id"]}
            yield named("response.output_item.added", output_index=index, item=_emptied(item))
            if item["type"] == "message":
                part = item["content"][0]
                yield named("response.content_part.added", **at, content_index=0, part={**part, "text": ""})
                yield named("response.output_text.delta", **at, content_index=0, delta=part["text"], logprobs=[])
                yield named("response.output_text.done", **at, content_index=0, text=part["text"], logprobs=[])
                yield named("response.content_part.done", **at, content_index=0, part=part)
            elif item["type"] == "function_call":
                arguments = item["arguments"]
                yield named("response.function_call_arguments.delta", **at, delta=arguments)
                yield named("response.function_call_arguments.done", **at, arguments=arguments, name=item["name"])
            yield named("response.output_item.done", output_index=index, item=item)
        answer = self.answer(reply)
        yield named(f"response.{answer['status']}", response=answer)

    def error_event(self, error: RequestError) -> bytes:
        return event({"type": "error", "code": error.code, "message": str(error), "param": error.field}, "error")

    def _begun(self, reply: Reply) -> JsonObject:
        return {
            "id": f"resp_{reply.id}", "object": "response", "created_at": int(time.time()), "status": "in_progress",
            "model": reply.model, "output": [], "error": None, "incomplete_details": None, "instructions": None,
            "metadata": {}, "parallel_tool_calls": True, "temperature": None, "top_p": None, "tool_choice": "auto",
            "tools": [], "usage": None,
        }  # fmt: skip

    def _items(self, reply: Reply) -> list[JsonObject]:
        items: list[JsonObject] = []
        if reasoning := reply.message.get("reasoning"):
            content = [{"type": "reasoning_text", "text": reasoning}]
            items.append({"type": "reasoning", "id": f"rs_{reply.id}", "summary": [], "content": content})
        if reply.text or not reply.calls:
            part = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}
            message = {"type": "message", "id": f"msg_{reply.id}", "role": "assistant", "status": "completed"}
            items.append({**message, "content": [part]})
        for call in reply.calls:
            items.append(
                {
                    "type": "function_call", "id": f"fc_{call['id']}", "call_id": call["id"], "status": "completed",
                    "name": call["function"]["name"], "arguments": call["function"]["arguments"],
                }
            )  # fmt: skip
        return items


class Messages(Dialect):
    """Anthropic's POST /v1/messages."""

    keep_alive = event({"type": "ping"}, "ping")
    _STOP: ClassVar[Mapping[str, str]] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

    def read(self, body: JsonObject) -> ChatRequest:
        choice = (body.get("tool_choice") or {}).get("type", "auto")
        if choice in {"any", "tool"}:
            raise _other_distribution("tool_choice")
        messages: list[JsonObject] = []
        if system := _text(body.get("system")):
            messages.append({"role": "system", "content": system})
        given = body.get("messages")
        if not isinstance(given, list):
            raise _invalid("'messages' must be a list of messages", "messages")
        for message in given:
            messages += _from_blocks(message)
        tools = [] if choice == "none" else body.get("tools") or []
        return ChatRequest(
            messages=_messages(messages),
            tools=tuple(_tool_of_anthropic(tool) for tool in tools),
            max_tokens=_count(body, "max_tokens"),
            stop=_stop(body, "stop_sequences"),
            parallel_tool_calls=not (body.get("tool_choice") or {}).get("disable_parallel_tool_use"),
            stream=bool(body.get("stream")),
        )

    def answer(self, reply: Reply) -> JsonObject:
        return {
            **self._begun(reply),
            "content": [block for block, _ in self._blocks(reply)],
            "stop_reason": self._STOP.get(reply.finish_reason, "end_turn"),
            "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens},
        }

    def events(self, reply: Reply, request: ChatRequest) -> Iterator[bytes]:
        def named(kind: str, **fields: Any) -> bytes:
            return event({"type": kind, **fields}, kind)

        yield named("message_start", message=self._begun(reply))
        for index, (block, delta) in enumerate(self._blocks(reply)):
            empty = {
                **block,
                **{key: "" if key != "input" else {} for key in block if key in {"text", "thinking", "input"}},
            }
            yield named("content_block_start", index=index, content_block=empty)
            yield named("content_block_delta", index=index, delta=delta)
            yield named("content_block_stop", index=index)
        stop = {"stop_reason": self._STOP.get(reply.finish_reason, "end_turn"), "stop_sequence": None}
        yield named("message_delta", delta=stop, usage={"output_tokens": reply.completion_tokens})
        yield named("message_stop")

    def error(self, error: RequestError) -> JsonObject:
        return {"type": "error", "error": {"type": _kind(error), "message": f"{error} [{error.code}]"}}

    def error_event(self, error: RequestError) -> bytes:
        return event(self.error(error), "error")

    def _begun(self, reply: Reply) -> JsonObject:
        return {
            "id": f"msg_{reply.id}", "type": "message", "role": "assistant", "model": reply.model, "content": [],
            "stop_reason": None, "stop_sequence": None,
            "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": 0},
        }  # fmt: skip

    def _blocks(self, reply: Reply) -> Iterator[tuple[JsonObject, JsonObject]]:
        """Yields each content block, and the same as one delta."""
        if thinking := reply.message.get("reasoning"):
            yield (
                {"type": "thinking", "thinking": thinking, "signature": ""},
                {"type": "thinking_delta", "thinking": thinking},
            )
        if reply.text or not reply.calls:
            yield {"type": "text", "text": reply.text}, {"type": "text_delta", "text": reply.text}
        for call in reply.calls:
            arguments = call["function"]["arguments"]
            block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}
            yield {**block, "input": _object(arguments)}, {"type": "input_json_delta", "partial_json": arguments}


DIALECTS: Mapping[str, Dialect] = {
    "/v1/chat/completions": ChatCompletions(),
    "/v1/responses": Responses(),
    "/v1/messages": Messages(),
}
"""By path."""


def new_id() -> str:
    """Returns an id for an answer or a tool call."""
    return uuid.uuid4().hex[:24]


def _kind(error: RequestError) -> str:
    if error.status == 429:
        return "rate_limit_error"
    if error.status in {401, 403}:
        return "authentication_error"
    return "invalid_request_error" if error.status < 500 else "api_error"


def _invalid(message: str, field: str) -> RequestError:
    return RequestError(400, "bad_request", message, field)


def _unsupported(field: str, remedy: str) -> RequestError:
    return RequestError(400, "not_supported", f"'{field}' is not supported: {remedy}", field)


def _other_distribution(field: str) -> RequestError:
    return RequestError(
        400,
        "other_distribution",
        f"'{field}' would make the model sample from another distribution than the one that is trained; leave it out",
        field,
    )


def _refuse_other_distributions(body: JsonObject) -> None:
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise _other_distribution("tool_choice")
    if (body.get("response_format") or {}).get("type", "text") != "text":
        raise _other_distribution("response_format")
    for field in ("logit_bias", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "bad_words"):
        if body.get(field):
            raise _other_distribution(field)
    if body.get("n") not in (None, 1):
        raise _unsupported("n", "one request is one reply, so that a rollout is one conversation at a time")


def _messages(given: object) -> tuple[Message, ...]:
    if not isinstance(given, list) or not given or not all(isinstance(message, dict) for message in given):
        raise _invalid("'messages' must be a list of at least one message", "messages")
    return tuple(template_message(message) for message in given)


def _text(content: object) -> str:
    """Returns the text of a message's content: text, null, or a list of text parts."""
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
                raise _invalid(
                    f"a part of type {kind!r} of a message is not text; the model reads text only", "messages"
                )
            parts.append(text)
        return "".join(parts)
    raise _invalid("the content of a message must be text, null or a list of text parts", "messages")


def _template_call(call: Any) -> JsonObject:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _invalid("a tool call must be {id, type: function, function: {name, arguments}}", "messages")
    arguments = function.get("arguments")
    named = {
        "name": function["name"],
        "arguments": _object(arguments) if isinstance(arguments, str) else arguments or {},
    }
    return {"id": call.get("id"), "type": "function", "function": named}


def _object(arguments: str) -> Any:
    """Returns the object in the text of a call's arguments, and the text itself if the model wrote no object."""
    try:
        found = json.loads(arguments or "{}")
    except ValueError:
        return arguments
    return found if isinstance(found, dict) else arguments


def _tool(tool: Any) -> JsonObject:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _invalid("a tool must be {type: function, function: {name, description, parameters}}", "tools")
    if function.get("strict"):
        function = {key: value for key, value in function.items() if key != "strict"}
    return {"type": "function", "function": function}


def _flat_tool(tool: Any) -> JsonObject:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, dict) else tool
        raise _unsupported("tools", f"a tool of type {kind!r} runs on OpenAI's servers; use functions")
    return _tool({"function": {key: tool[key] for key in ("name", "description", "parameters") if key in tool}})


def _tool_of_anthropic(tool: Any) -> JsonObject:
    if not isinstance(tool, dict) or "input_schema" not in tool:
        raise _unsupported("tools", "a tool without input_schema runs on Anthropic's servers; use tools with a schema")
    function = {
        "name": tool.get("name"),
        "description": tool.get("description", ""),
        "parameters": tool["input_schema"],
    }
    return _tool({"function": function})


def _count(body: JsonObject, field: str) -> int | None:
    value = body.get(field)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _invalid(f"'{field}' must be a whole number of at least 1", field)
    return value


def _stop(body: JsonObject, field: str) -> tuple[str, ...]:
    value = body.get(field) or ()
    texts = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(text, str) and text for text in texts):
        raise _invalid(f"'{field}' must be text or a list of texts", field)
    return texts


def _usage(reply: Reply) -> JsonObject:
    prompt, completion = reply.prompt_tokens, reply.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _emptied(item: JsonObject) -> JsonObject:
    """Returns an item of a response as it is when it begins."""
    if item["type"] == "message":
        return {**item, "status": "in_progress", "content": []}
    return {**item, "status": "in_progress", "arguments": ""} if item["type"] == "function_call" else item


def _joined_items(items: Sequence[Any]) -> list[JsonObject]:
    """Returns the items of a response's input as messages. The calls after a text belong to the text's message."""
    messages: list[JsonObject] = []
    reasoning = ""
    for item in items:
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            message = {"role": item.get("role"), "content": item.get("content")}
            if message["role"] == "assistant" and reasoning:
                message["reasoning"], reasoning = reasoning, ""
            messages.append(message)
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
                if reasoning:
                    messages[-1]["reasoning"], reasoning = reasoning, ""
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append({"id": item.get("call_id"), "function": function})
        elif kind == "function_call_output":
            output = item.get("output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        elif kind == "reasoning":
            reasoning = "".join(part.get("text", "") for part in item.get("content") or ())
        else:
            raise _unsupported("input", f"an item of type {kind!r} is unknown")
    return messages


def _from_blocks(message: Any) -> list[JsonObject]:
    """Returns a message of Anthropic's form in OpenAI's form. Each tool result is a message."""
    if not isinstance(message, dict) or message.get("role") not in {"user", "assistant"}:
        raise _invalid("a message must have the role user or assistant", "messages")
    content, role = message.get("content"), message["role"]
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    results: list[JsonObject] = []
    texts: list[JsonObject] = []
    calls: list[JsonObject] = []
    reasoning = ""
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "function": function})
        elif kind == "tool_result":
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content")})
        elif kind == "thinking":
            reasoning += block.get("thinking", "")
        elif kind != "redacted_thinking":
            texts.append(block)
    if texts or calls or not results:
        whole: JsonObject = {"role": role, "content": texts}
        if calls:
            whole["tool_calls"] = calls
        if reasoning:
            whole["reasoning"] = reasoning
        results.append(whole)
    return results
