"""OpenAI's Chat Completions."""

from __future__ import annotations

import time
from collections.abc import Iterator

from gristmill_env.gateway.dialects.base import (
    ChatRequest,
    Dialect,
    JsonObject,
    Reply,
    RequestError,
    error_kind,
    event,
    function_tool,
    other_distribution,
    read_count,
    read_messages,
    read_stop,
    unsupported,
)


class ChatCompletions(Dialect):
    """OpenAI's POST /v1/chat/completions."""

    def read(self, body: JsonObject) -> ChatRequest:
        refuse_other_distributions(body)
        if body.get("logprobs"):
            raise unsupported("logprobs", "the gateway keeps log-probabilities for the training itself")
        choice = body.get("tool_choice")
        tools = [] if choice == "none" else body.get("tools") or []
        options = body.get("stream_options") or {}
        return ChatRequest(
            messages=read_messages(body.get("messages")),
            tools=tuple(function_tool(tool) for tool in tools),
            max_tokens=read_count(body, "max_completion_tokens") or read_count(body, "max_tokens"),
            stop=read_stop(body, "stop"),
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
        return {"error": {"message": str(error), "type": error_kind(error), "param": error.field, "code": error.code}}

    def _head(self, reply: Reply, what: str) -> JsonObject:
        return {"id": f"chatcmpl-{reply.id}", "object": what, "created": int(time.time()), "model": reply.model}


def refuse_other_distributions(body: JsonObject) -> None:
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise other_distribution("tool_choice")
    if (body.get("response_format") or {}).get("type", "text") != "text":
        raise other_distribution("response_format")
    for field in ("logit_bias", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "bad_words"):
        if body.get(field):
            raise other_distribution(field)
    if body.get("n") not in (None, 1):
        raise unsupported("n", "one request is one reply, so that a rollout is one conversation at a time")


def _usage(reply: Reply) -> JsonObject:
    prompt, completion = reply.prompt_tokens, reply.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
