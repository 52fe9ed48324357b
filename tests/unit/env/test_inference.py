"""What is said when a model server cannot be used. (That it works is tested against a real vLLM.)"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from gristmill import Manifest, SamplingParams
from gristmill_env.errors import InferenceError
from gristmill_env.inference import ModelServer
from gristmill_env.settings import ServerConfig

from .conftest import FailingServer

GENERATE = "/inference/v1/generate"
SAMPLING = SamplingParams(temperature=1.0, max_tokens=4)


def client(url: str, patience: float = 0.5, **settings: Any) -> ModelServer:
    return ModelServer(ServerConfig(base_url=url, **settings), patience=patience)


def choice(**changes: Any) -> dict[str, Any]:
    logprobs = {"content": [{"token_id": 5, "logprob": -0.5, "rank": 1}]}
    return {"finish_reason": "stop", "token_ids": [5], "logprobs": logprobs, "weight_versions": None} | changes


async def test_an_unreachable_server_is_named_with_how_long_it_was_tried() -> None:
    async with client("http://127.0.0.1:1") as server:
        started = time.monotonic()
        with pytest.raises(InferenceError, match=r"http://127\.0\.0\.1:1 did not answer /v1/models for \d s .*running"):
            await server.connect(patience=1.2)
        assert 1.2 <= time.monotonic() - started < 3


async def test_another_model_names_the_line_to_change(failing_server: FailingServer) -> None:
    async with client(failing_server.url, model_name="smollm2") as server:
        with pytest.raises(InferenceError, match=r"wants model 'smollm2'.*serves 'tiny'; set MODEL=smollm2 in \.env"):
            await server.connect(patience=1)


@pytest.mark.parametrize("name", [None, "tiny", "/models/tiny", "hub/original"])
async def test_a_model_may_be_called_by_any_of_its_names(failing_server: FailingServer, name: str | None) -> None:
    manifest = Manifest(
        name="tiny", requested="hub/original", revision="1", tokenizer_path="/t", weights_path="/w", serve_path="/s",
        sha256="0", dtype="float32", max_model_len=1024,
    )  # fmt: skip
    async with client(f"{failing_server.url}/v1", model_name=name) as server:
        served = await server.connect(patience=1, manifest=manifest)
    assert (served.name, served.max_model_len) == ("tiny", 1024)


@pytest.mark.parametrize(
    "answer",
    [
        (404, {"detail": "Not Found"}),
        (200, {"choices": [choice(token_ids=None)]}),
        (200, {"choices": [choice(token_ids=[])]}),
        (200, {"choices": [choice(logprobs=None)]}),
    ],
)
async def test_a_server_without_token_ids_is_refused(failing_server: FailingServer, answer: tuple[int, Any]) -> None:
    failing_server.answers[GENERATE] = lambda: answer
    async with client(failing_server.url) as server:
        with pytest.raises(InferenceError, match=r"training needs token ids.*--enable-scale-out"):
            await server.generate([1, 2], SAMPLING, 1)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((200, {"choices": [choice(token_ids=[6])]}), "log-probabilities of other tokens"),
        ((200, {"choices": [choice()] * 2}), "returned 2 of 1 completions"),
        ((200, {"text": "hello"}), "does not answer .* as vLLM does"),
        ((400, {"error": {"message": "prompt is longer than 1024"}}), "HTTP 400.*prompt is longer than 1024"),
        ((404, {"error": {"message": "The model `x` does not exist."}}), "HTTP 404.*does not exist"),
        ((401, {"error": "no"}), "set api_key"),
    ],
)
async def test_a_refusal_is_told_at_once(failing_server: FailingServer, answer: tuple[int, Any], message: str) -> None:
    failing_server.answers[GENERATE] = lambda: answer
    async with client(failing_server.url, patience=30) as server:
        with pytest.raises(InferenceError, match=message):
            await server.generate([1, 2], SAMPLING, 1)
    assert failing_server.asked.count(GENERATE) == 1


@pytest.mark.parametrize(
    "answer", [(500, {"error": "engine died"}), (200, {"choices": [choice(finish_reason="abort")]})]
)
async def test_a_server_in_trouble_is_asked_again_until_patience_ends(
    failing_server: FailingServer, answer: tuple[int, Any]
) -> None:
    failing_server.answers[GENERATE] = lambda: answer
    async with client(failing_server.url, patience=1.0) as server:
        with pytest.raises(InferenceError, match=rf"did not answer {GENERATE} for 1 s"):
            await server.generate([1, 2], SAMPLING, 1)
    assert failing_server.asked.count(GENERATE) >= 3


async def test_a_request_that_takes_too_long_is_given_up(failing_server: FailingServer) -> None:
    def slow() -> tuple[int, Any]:
        time.sleep(0.8)
        return 200, {"choices": []}

    failing_server.answers[GENERATE] = slow
    async with client(failing_server.url, patience=0.1, timeout=0.3) as server:
        with pytest.raises(InferenceError, match="Timeout"):
            await server.generate([1, 2], SAMPLING, 1)


def test_no_manifest_is_no_error_here(tmp_path: Path) -> None:
    from gristmill_env.prepare import read_manifest

    assert read_manifest(tmp_path) is None
