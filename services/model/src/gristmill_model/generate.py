"""POST /generate, from which atroposlib's `server_type: vllm` requests tokens and log-probabilities.

Earlier versions of vLLM had this endpoint, and Atropos brings a custom server for it. Here vLLM loads this class by
`--middleware`, and /v1/completions does the work:

    {"prompt": {"prompt_token_ids": [...]}, "logprobs": 0, "n": 4, "max_tokens": 64, ...any sampling parameter}
 -> {"logprobs": per completion [per token [{id: log-probability}]], "finish_reasons": ["stop", ...],
     "prompt_logprobs": if requested, per position {id: log-probability}, else null}
"""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from typing import Any, Final

from gristmill_model.asgi import App, Receive, Scope, Send, read_body, read_json, sized, with_body

PATH: Final = "/generate"
_DOES_IT: Final = "/v1/completions"


class AtroposGenerate:
    """ASGI middleware that adds /generate. It passes errors of /v1/completions on unchanged."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (scope["method"], scope["path"]) != ("POST", PATH):
            await self._app(scope, receive, send)
            return
        inner, ask = with_body(scope, receive, _question(await read_body(receive)))
        start: MutableMapping[str, Any] = {}
        answered = bytearray()

        async def answer(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
                return
            answered.extend(message.get("body", b""))
            if message.get("more_body"):
                return
            body = _answer(bytes(answered)) if start["status"] == 200 else bytes(answered)
            await send({**start, "headers": sized(start["headers"], body)})
            await send({"type": "http.response.body", "body": body})

        await self._app({**inner, "path": _DOES_IT, "raw_path": _DOES_IT.encode()}, ask, answer)


def _question(body: bytes) -> bytes:
    """Returns the body for /v1/completions. Passes an invalid body on unchanged, and the endpoint refuses it."""
    request = read_json(body)
    if not isinstance(request, dict):
        return body
    prompt = request.get("prompt")
    if isinstance(prompt, dict):
        request["prompt"] = prompt.get("prompt_token_ids")
    return json.dumps({"logprobs": 0, **request, "stream": False, "return_token_ids": True}).encode()


def _answer(body: bytes) -> bytes:
    choices = json.loads(body)["choices"]
    prompt = choices[0].get("prompt_logprobs")
    return json.dumps(
        {
            "logprobs": [_by_token(choice) for choice in choices],
            "finish_reasons": [choice["finish_reason"] for choice in choices],
            "prompt_logprobs": prompt
            and [{token: found["logprob"] for token, found in (position or {}).items()} for position in prompt],
        }
    ).encode()


def _by_token(choice: dict[str, Any]) -> list[list[dict[str, float]]]:
    logprobs = choice["logprobs"]["token_logprobs"]
    return [[{str(token): logprob}] for token, logprob in zip(choice["token_ids"], logprobs, strict=True)]
