"""OpenAI's Responses."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from gristmill_env.gateway.dialects.base import (
    ChatRequest,
    JsonObject,
    Reply,
    RequestError,
    constraint,
    event,
    function_tool,
    invalid,
    read_count,
    read_messages,
    unsupported,
)
from gristmill_env.gateway.dialects.chat import ChatCompletions, forced_tool, refuse_unknown_constraints


class Responses(ChatCompletions):
    """OpenAI's POST /v1/responses."""

    def read(self, body: JsonObject) -> ChatRequest:
        refuse_unknown_constraints(body)
        for field in ("previous_response_id", "conversation"):
            if body.get(field):
                raise unsupported(field, "send the whole conversation as `input`")
        given = body.get("input")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        if not isinstance(items, list) or not items:
            raise invalid("'input' must be text or a list of items", "input")
        messages = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
        choice = body.get("tool_choice")
        parallel = body.get("parallel_tool_calls") is not False
        tools = tuple(_flat_tool(tool) for tool in body.get("tools") or [])
        return ChatRequest(
            messages=read_messages([*messages, *_joined_items(items)]),
            tools=tools,
            calls=choice != "none",
            max_tokens=read_count(body, "max_output_tokens"),
            parallel_tool_calls=parallel,
            stream=bool(body.get("stream")),
            constraint=constraint(
                tools,
                forced_tool(choice),
                (body.get("text") or {}).get("format"),
                {name: body.get(name) for name in ("logit_bias", "structured_outputs")},
                "text.format",
                parallel=parallel,
            ),
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


def _flat_tool(tool: Any) -> JsonObject:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, dict) else tool
        raise unsupported("tools", f"a tool of type {kind!r} runs on OpenAI's servers; use functions")
    return function_tool({"function": {key: tool[key] for key in ("name", "description", "parameters") if key in tool}})


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
            raise unsupported("input", f"an item of type {kind!r} is unknown")
    return messages
