"""Anthropic's Messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from gristmill_env.data import object_of
from gristmill_env.gateway.dialects.base import (
    ChatRequest,
    Dialect,
    JsonObject,
    Reply,
    RequestError,
    constraint,
    error_kind,
    event,
    function_tool,
    invalid,
    read_count,
    read_messages,
    read_stop,
    text_of_content,
    unsupported,
)

_INVALID = "INVALID_JSON"
"""The key of Anthropic's convention for arguments of a call that are no JSON object."""


class Messages(Dialect):
    """Anthropic's POST /v1/messages."""

    keep_alive = event({"type": "ping"}, "ping")
    _STOP: ClassVar[Mapping[str, str]] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

    def read(self, body: JsonObject) -> ChatRequest:
        chosen = body.get("tool_choice") or {}
        choice = chosen.get("type", "auto")
        messages: list[JsonObject] = []
        if system := text_of_content(body.get("system")):
            messages.append({"role": "system", "content": system})
        given = body.get("messages")
        if not isinstance(given, list):
            raise invalid("'messages' must be a list of messages", "messages")
        for message in given:
            messages += _from_blocks(message)
        tools = tuple(_tool_of_anthropic(tool) for tool in body.get("tools") or [])
        parallel = not chosen.get("disable_parallel_tool_use")
        forced = {"any": "required", "tool": chosen}.get(choice)
        form_field, form = "output_config", (body.get("output_config") or {}).get("format")
        if form is None:
            form_field, form = "output_format", body.get("output_format")
        return ChatRequest(
            messages=read_messages(messages),
            tools=tools,
            calls=choice != "none",
            max_tokens=read_count(body, "max_tokens"),
            stop=read_stop(body, "stop_sequences"),
            parallel_tool_calls=parallel,
            stream=bool(body.get("stream")),
            constraint=constraint(tools, forced, form, {}, form_field, parallel=parallel),
        )

    def answer(self, reply: Reply) -> JsonObject:
        return {
            **self._begun(reply),
            "content": [block for block, _ in self._blocks(reply)],
            **self._stopped(reply),
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
        yield named("message_delta", delta=self._stopped(reply), usage={"output_tokens": reply.completion_tokens})
        yield named("message_stop")

    def error(self, error: RequestError) -> JsonObject:
        return {"type": "error", "error": {"type": error_kind(error), "message": f"{error} [{error.code}]"}}

    def error_event(self, error: RequestError) -> bytes:
        return event(self.error(error), "error")

    def _stopped(self, reply: Reply) -> JsonObject:
        if reply.stop_text is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop_text}
        return {"stop_reason": self._STOP.get(reply.finish_reason, "end_turn"), "stop_sequence": None}

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
            given = object_of(arguments)
            if not isinstance(given, dict):  # Clients would fail on it, or repair it and send back something else.
                given = {_INVALID: arguments}
                arguments = json.dumps(given, ensure_ascii=False)
            block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}
            yield {**block, "input": given}, {"type": "input_json_delta", "partial_json": arguments}


def _tool_of_anthropic(tool: Any) -> JsonObject:
    if not isinstance(tool, dict) or "input_schema" not in tool:
        raise unsupported("tools", "a tool without input_schema runs on Anthropic's servers; use tools with a schema")
    function = {
        "name": tool.get("name"),
        "description": tool.get("description", ""),
        "parameters": tool["input_schema"],
    }
    return function_tool({"function": function})


def _from_blocks(message: Any) -> list[JsonObject]:
    """Returns a message of Anthropic's form in OpenAI's form. Each tool result is a message."""
    if not isinstance(message, dict) or message.get("role") not in {"user", "assistant"}:
        raise invalid("a message must have the role user or assistant", "messages")
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
            given = block.get("input") or {}
            if isinstance(given, dict) and given.keys() == {_INVALID}:
                given = given[_INVALID]
            function = {"name": block.get("name"), "arguments": given}
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
