"""POST /v1/chat/completions of any OpenAI-compatible server: messages in, text out.

The completions have no token ids, so they cannot be used for training.
"""

from __future__ import annotations

from typing import Any

from gristmill_env.errors import InferenceError
from gristmill_env.inference.http import ServerHttp, ServerTroubleError
from gristmill_env.inference.request import Completion, GenerationRequest
from gristmill_env.inference.thinking import Dialect, Thinking
from gristmill_env.inference.wire import ChatChoice, ChatMessage, Chatted

_BROKEN_OFF = frozenset({None, "abort", "error"})


async def generate_text(
    http: ServerHttp, url: str, model: str, request: GenerationRequest, dialect: Dialect, thinking: Thinking
) -> list[Completion]:
    """Returns `request.count` completions as text; only one completion from a server that ignores `n`.

    `url`: the route's URL. vLLM is asked to keep a stop string in the text; other servers leave it out.

    Raises ServerTroubleError; InferenceError when the server refuses the request or does not support one of its
    fields.
    """
    body = {**_body(model, request, dialect), **thinking.body(dialect)}
    chatted = await http.ask("POST", url, Chatted, json=body)
    if len(chatted.choices) not in {1, request.count}:
        raise InferenceError(
            "completion_count",
            f"the model server at {http.url} returned {len(chatted.choices)} of {request.count} completions",
            url=http.url,
            found=len(chatted.choices),
            wanted=request.count,
        )
    counted = chatted.usage.completion_tokens if chatted.usage is not None and len(chatted.choices) == 1 else None
    return [_completion(http.path(url), choice, counted) for choice in chatted.choices]


def _body(model: str, request: GenerationRequest, dialect: Dialect) -> dict[str, Any]:
    limit = "max_completion_tokens" if dialect is Dialect.OPENAI else "max_tokens"
    body: dict[str, Any] = {
        "model": model,
        "messages": [dict(message) for message in request.messages],
        "temperature": request.sampling.temperature,
        limit: request.sampling.max_tokens,
    }
    # Optional fields that are not set are left out, because not every server knows all fields.
    if request.sampling.top_p != 1:
        body["top_p"] = request.sampling.top_p
    if request.count > 1:
        body["n"] = request.count
    if request.stop:
        body["stop"] = list(request.stop)
    if dialect is not Dialect.VLLM:
        _refuse_vllm_only(request)
        return body
    if request.prefill:
        body["messages"].append({"role": "assistant", "content": request.prefill})
        body |= {"add_generation_prompt": False, "continue_final_message": True}
    if request.stop:
        body["include_stop_str_in_output"] = True
    if request.stop_token_ids:
        body["stop_token_ids"] = list(request.stop_token_ids)
    return body


def _refuse_vllm_only(request: GenerationRequest) -> None:
    wanted = {
        "prefill": bool(request.prefill),
        "stop_token_ids": bool(request.stop_token_ids),
    }
    if refused := [name for name, there in wanted.items() if there]:
        raise InferenceError(
            "needs_vllm",
            f"{' and '.join(refused)} cannot be asked of an OpenAI-compatible server that is not vLLM; "
            "leave it out, or serve the model with vLLM",
            settings=refused,
        )


def _completion(path: str, choice: ChatChoice, counted: int | None) -> Completion:
    if choice.finish_reason in _BROKEN_OFF:
        raise ServerTroubleError(path, f"a completion ended with '{choice.finish_reason}'")
    assert choice.finish_reason is not None
    return Completion([], [], choice.finish_reason, [], _text(choice.message, choice.finish_reason), counted)


def _text(message: ChatMessage, finish_reason: str) -> str:
    """Returns the text as the model wrote it, before a reasoning parser split it. Cut reasoning has no end tag."""
    thought, said = message.reasoning or message.reasoning_content, message.content or ""
    if not thought:
        return said
    opened = "<think>\n" + thought.strip("\n")
    return opened if finish_reason == "length" and not said else f"{opened}\n</think>\n\n{said}"
