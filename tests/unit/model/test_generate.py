"""POST /generate as atroposlib's vLLM client sends and reads it; /v1/completions does the work."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gristmill_model.generate import AtroposGenerate

COMPLETIONS = {
    "choices": [
        {
            "finish_reason": "stop",
            "token_ids": [7, 258],
            "logprobs": {"token_logprobs": [-0.5, -0.25]},
            "prompt_logprobs": [None, {"3": {"logprob": -1.5, "rank": 1}}],
        },
        {"finish_reason": "length", "token_ids": [9], "logprobs": {"token_logprobs": [-2.0]}},
    ]
}


class Completions:
    """An application that records its requests, and answers in two pieces."""

    def __init__(self, status: int = 200, answer: dict[str, Any] = COMPLETIONS) -> None:
        self.status = status
        self.answer = json.dumps(answer).encode()
        self.scope: dict[str, Any] = {}
        self.asked = b""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scope = dict(scope)
        more = True
        while more:
            message = await receive()
            self.asked += message["body"]
            more = message["more_body"]
        sizes = [(b"content-length", str(len(self.answer)).encode()), (b"x-kept", b"1")]
        await send({"type": "http.response.start", "status": self.status, "headers": sizes})
        await send({"type": "http.response.body", "body": self.answer[:9], "more_body": True})
        await send({"type": "http.response.body", "body": self.answer[9:]})


def ask(app: Completions, body: bytes, path: str = "/generate") -> tuple[dict[bytes, bytes], int, bytes]:
    """Returns headers, status and body of the answer. The request comes in two pieces."""
    pieces = [body[:5], body[5:]]
    answer: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def send(message: Any) -> None:
        answer.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": [(b"content-length", b"1"), (b"x-mine", b"1")]}
    asyncio.run(AtroposGenerate(app)(scope, receive, send))
    return dict(answer[0]["headers"]), answer[0]["status"], b"".join(message["body"] for message in answer[1:])


def test_generate_returns_tokens_and_logprobs_in_the_form_of_atropos_client() -> None:
    app = Completions()
    asked = {"prompt": {"prompt_token_ids": [1, 2, 3]}, "logprobs": 0, "n": 2, "temperature": 0.5}
    headers, status, body = ask(app, json.dumps(asked).encode())
    assert (app.scope["path"], dict(app.scope["headers"])[b"x-mine"]) == ("/v1/completions", b"1")
    sent = json.loads(app.asked)
    assert int(dict(app.scope["headers"])[b"content-length"]) == len(app.asked)
    assert (sent["prompt"], sent["n"], sent["temperature"], sent["logprobs"]) == ([1, 2, 3], 2, 0.5, 0)
    assert sent["return_token_ids"] is True
    assert (status, int(headers[b"content-length"]), headers[b"x-kept"]) == (200, len(body), b"1")
    assert json.loads(body) == {
        "logprobs": [[[{"7": -0.5}], [{"258": -0.25}]], [[{"9": -2.0}]]],
        "finish_reasons": ["stop", "length"],
        "prompt_logprobs": [{}, {"3": -1.5}],
    }


@pytest.mark.parametrize("body", [b"not JSON", b"[1, 2, 3]", b"[" * 100_000])
def test_generate_passes_unreadable_bodies_to_the_endpoint_which_refuses(body: bytes) -> None:
    app = Completions(400, {"error": "no"})
    _, status, answer = ask(app, body)
    assert app.asked == body
    assert (status, json.loads(answer)) == (400, {"error": "no"})


def test_request_to_another_path_is_passed_on_unchanged() -> None:
    app = Completions()
    asked = b'{"prompt": "Hello"}'
    _, _, body = ask(app, asked, "/v1/completions")
    assert (app.asked, body) == (asked, app.answer)
