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
    constraint,
    error_kind,
    event,
    function_tool,
    read_count,
    read_messages,
    read_stop,
    unsupported,
)


class ChatCompletions(Dialect):
    """OpenAI's POST /v1/chat/completions."""

    def read(self, body: JsonObject) -> ChatRequest:
        refuse_unknown_constraints(body)
        if body.get("logprobs"):
            raise unsupported("logprobs", "the gateway keeps log-probabilities for the training itself")
        choice = body.get("tool_choice")
        parallel = body.get("parallel_tool_calls") is not False
        tools = tuple(function_tool(tool) for tool in body.get("tools") or [])
        form = body.get("response_format") or {}
        options = body.get("stream_options") or {}
        return ChatRequest(
            messages=read_messages(body.get("messages")),
            tools=tools,
            calls=choice != "none",
            max_tokens=read_count(body, "max_completion_tokens") or read_count(body, "max_tokens"),
            stop=read_stop(body, "stop"),
            parallel_tool_calls=parallel,
            stream=bool(body.get("stream")),
            with_usage=bool(options.get("include_usage")),
            constraint=constraint(
                tools,
                forced_tool(choice, "function"),
                {**form, "schema": (form.get("json_schema") or {}).get("schema")},
                {name: body.get(name) for name in ("logit_bias", "structured_outputs")},
                "response_format",
                parallel=parallel,
            ),
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


_FORM = "use response_format"
_RUNS = "it is a setting of the run"
_REFUSED = {
    "guided_json": _FORM, "guided_regex": _FORM, "guided_choice": _FORM, "guided_grammar": _FORM, "bad_words": _FORM,
    "allowed_token_ids": _FORM, "min_tokens": "the model ends its reply", "stop_token_ids": "use stop",
    "functions": "use tools", "function_call": "use tool_choice", "chat_template_kwargs": _RUNS,
    "chat_template": _RUNS,
}  # fmt: skip
"""Fields that change the reply and have no effect here, and what to use."""
_HARMLESS = [("function_call", "auto"), ("function_call", "none")]


def refuse_unknown_constraints(body: JsonObject) -> None:
    """Refuses what would change the model's distribution in a way that cannot be passed on. Raises RequestError."""
    for field, remedy in _REFUSED.items():
        if body.get(field) and (field, body[field]) not in _HARMLESS:
            raise unsupported(field, remedy)
    if "audio" in (body.get("modalities") or ()):
        raise unsupported("modalities", "the model writes text only")
    if body.get("n") not in (None, 1):
        raise unsupported("n", "one request is one reply, so that a rollout is one conversation at a time")


def forced_tool(choice: object, inner: str | None = None) -> object:
    """Returns the tool that a request's `tool_choice` forces: its {"name"}, "required" for any, or None.

    `inner`: the key of the object with the name.
    """
    if choice in (None, "auto", "none"):
        return None
    return choice.get(inner) or {} if isinstance(choice, dict) and inner is not None else choice


def _usage(reply: Reply) -> JsonObject:
    prompt, completion = reply.prompt_tokens, reply.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
