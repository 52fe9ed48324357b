"""Replaces vLLM in measurements of everything else: each request takes STUB_LATENCY_S seconds, at any load.

With STUB_AT_A_TIME, the server works on this number of requests at a time; the others wait. STUB_LENGTH is the most
tokens of a conversation.

An ASGI application for uvicorn with the endpoints of one server that environments and trainers call. All completions
have the same tokens and log-probabilities, so nothing can be learned from them.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

_LATENCY: Final = float(os.environ.get("STUB_LATENCY_S", "1"))
_PLACES: Final = asyncio.Semaphore(int(os.environ.get("STUB_AT_A_TIME", "1000000")))
_TOKENS: Final = list(range(40, 56))
_LOGPROBS: Final = {"content": [{"token_id": token, "logprob": -1.0} for token in _TOKENS]}
_LENGTH: Final = int(os.environ.get("STUB_LENGTH", "512"))
_MODEL: Final = {"id": "tiny", "root": "tiny", "max_model_len": _LENGTH, "owned_by": "vllm"}
_CHAT: Final = {
    "id": "chat", "object": "chat.completion", "created": 0, "model": "tiny",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "stub"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 16, "completion_tokens": len(_TOKENS), "total_tokens": 16 + len(_TOKENS)},
}  # fmt: skip

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_version = "default"


async def app(scope: Message, receive: Receive, send: Send) -> None:
    """Answers one request."""
    if scope["type"] != "http":
        return
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    status, answer = await _answer(scope["method"], scope["path"], body)
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


async def _answer(method: str, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
    global _version
    match method, path:
        case "GET", "/health":
            return 200, {}
        case "GET", "/v1/models":
            return 200, {"data": [_MODEL]}
        case "GET", "/weight_info":
            return 200, {"weight_version": _version}
        case "POST", "/update_weight_version":
            _version = json.loads(body)["new_version"]
            return 200, {}
        case "POST", "/inference/v1/generate":
            async with _PLACES:
                await asyncio.sleep(_LATENCY)
            return 200, {"choices": [_choice()] * json.loads(body)["sampling_params"]["n"]}
        case "POST", "/v1/chat/completions":
            async with _PLACES:
                await asyncio.sleep(_LATENCY)
            return 200, _CHAT
        case "GET", "/inference/v1/generate":
            return 405, {}
    return 404, {}


def _choice() -> dict[str, Any]:
    spans = [{"version": _version, "start": 0, "end": len(_TOKENS)}]
    return {"finish_reason": "stop", "token_ids": _TOKENS, "logprobs": _LOGPROBS, "weight_versions": spans}
