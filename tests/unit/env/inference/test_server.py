"""The errors for an unusable model server. (Other tests show with a real vLLM that a usable server works.)"""

from __future__ import annotations

import time
from typing import Any

import pytest
from tests.support.errors import raises
from tests.unit.env.conftest import FailingServer

from gristmill import Manifest
from gristmill_env.errors import InferenceError

from .conftest import ASK, CHAT, GENERATE, answers, choice, client

pytestmark = pytest.mark.slow


async def test_unreachable_server_is_reported_with_the_time_spent() -> None:
    async with client("http://127.0.0.1:1") as server:
        started = time.monotonic()
        with raises(InferenceError, "model_server_unreachable", urls=["http://127.0.0.1:1"]) as raised:
            await server.connect(patience=1.2)
        assert "/v1/models" in raised.value.values["problems"][0]
        assert raised.value.values["seconds"] >= 1.2
        assert time.monotonic() - started >= 1.2


async def test_server_with_another_model_is_refused_with_the_line_to_change(failing_server: FailingServer) -> None:
    async with client(failing_server, model_name="smollm2") as server:
        with raises(InferenceError, "model_not_served", model="smollm2", known=["tiny"]) as raised:
            await server.connect(patience=1)
    assert "MODEL=smollm2" in str(raised.value)


@pytest.mark.parametrize("name", [None, "tiny", "/models/tiny", "hub/original"])
async def test_model_may_be_named_by_any_of_its_names(failing_server: FailingServer, name: str | None) -> None:
    manifest = Manifest(
        name="tiny", requested="hub/original", revision="1", tokenizer_path="/t", weights_path="/w", serve_path="/s",
        sha256="0", dtype="float32", max_model_len=1024,
    )  # fmt: skip
    async with client(f"{failing_server.url}/v1", model_name=name) as server:
        served = await server.connect(patience=1, manifest=manifest)
    assert (served.name, served.max_model_len, served.text_only) == ("tiny", 1024, False)


async def test_server_with_several_models_requires_a_model_name(failing_server: FailingServer) -> None:
    failing_server.answers["/v1/models"] = lambda: (200, {"data": [{"id": "a"}, {"id": "b"}, {"id": "c"}]})
    async with client(failing_server) as server:
        with raises(InferenceError, "several_models", known=["a", "b", "c"]):
            await server.connect(patience=1)
    async with client(failing_server, model_name="b") as server:
        assert (await server.connect(patience=1)).name == "b"


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
    async with client(failing_server) as server:
        await server.connect(patience=1)
        with raises(InferenceError, "no_token_ids", url=failing_server.url) as raised:
            await server.generate(ASK)
    assert "--enable-scale-out" in str(raised.value)


async def test_text_only_server_is_detected_and_refused_for_training(failing_server: FailingServer) -> None:
    failing_server.takes_tokens = False
    async with client(failing_server) as server:
        assert (await server.connect(patience=1)).text_only
        with raises(InferenceError, "no_token_ids", url=failing_server.url):
            server.refuse_text_only()
    async with client(failing_server, server_type="vllm") as server:
        with raises(InferenceError, "no_token_ids", url=failing_server.url):
            await server.connect(patience=1)


async def test_server_type_openai_uses_text_although_the_server_has_token_ids(failing_server: FailingServer) -> None:
    async with client(failing_server, server_type="openai") as server:
        assert (await server.connect(patience=1)).text_only
        with raises(InferenceError, "no_token_ids", url=failing_server.url):
            server.refuse_text_only()
    async with client(failing_server) as server:
        assert not (await server.connect(patience=1)).text_only
        server.refuse_text_only()


@pytest.mark.parametrize(
    ("answer", "code", "values"),
    [
        ((200, {"choices": [choice(token_ids=[6])]}), "logprobs_mismatch", {}),
        ((200, {"choices": [choice()] * 2}), "completion_count", {"found": 2, "wanted": 1}),
        ((200, {"text": "hello"}), "answer_invalid", {"path": GENERATE}),
        ((400, {"error": {"message": "no such parameter"}}), "every_prompt_refused", {"status": 400}),
        ((404, {"error": {"message": "The model `x` does not exist."}}), "request_refused", {"status": 404}),
        ((401, {"error": "no"}), "api_key_refused", {"status": 401, "path": GENERATE}),
    ],
)
async def test_server_refusal_is_reported_at_once(
    failing_server: FailingServer, answer: tuple[int, Any], code: str, values: dict[str, Any]
) -> None:
    failing_server.answers[GENERATE] = lambda: answer
    async with client(failing_server, patience=30) as server:
        await server.connect(patience=1)
        with raises(InferenceError, code, url=failing_server.url, **values) as raised:
            await server.generate(ASK)
    if code in ("request_refused", "every_prompt_refused"):
        assert answer[1]["error"]["message"] in str(raised.value)
    assert failing_server.asked.count(GENERATE) == (2 if code == "every_prompt_refused" else 1)


@pytest.mark.parametrize(
    ("answer", "told"),
    [((500, {"error": "engine died"}), "HTTP 500"), ((200, {"choices": [choice(finish_reason="abort")]}), "'abort'")],
)
async def test_failing_server_is_asked_again_until_patience_ends(
    failing_server: FailingServer, answer: tuple[int, Any], told: str
) -> None:
    failing_server.answers[GENERATE] = lambda: answer
    async with client(failing_server, patience=4.0) as server:
        await server.connect(patience=1)
        with raises(InferenceError, "model_server_unreachable", urls=[failing_server.url]) as raised:
            await server.generate(ASK)
    assert raised.value.values["seconds"] >= 4.0
    [problem] = raised.value.values["problems"]
    assert problem.startswith(GENERATE)
    assert told in problem
    assert failing_server.asked.count(GENERATE) >= 3


async def test_client_waits_as_long_as_the_server_requests(failing_server: FailingServer) -> None:
    failing_server.answers[GENERATE] = lambda: (429, {}) if len(failing_server.bodies) == 1 else answers(choice())
    failing_server.headers["Retry-After"] = "1.5"
    async with client(failing_server, patience=30) as server:
        await server.connect(patience=1)
        started = time.monotonic()
        await server.generate(ASK)
        assert time.monotonic() - started >= 1.5
    assert failing_server.asked.count(GENERATE) == 2


@pytest.mark.parametrize(
    ("settings", "path", "code"),
    [
        ({}, CHAT, "request_refused"),
        ({"server_type": "openai"}, CHAT, "request_refused"),
        ({"server_type": "vllm"}, GENERATE, "no_token_ids"),
    ],
)
async def test_address_without_a_path_is_asked_at_the_path_of_its_server_type(
    failing_server: FailingServer, settings: dict[str, Any], path: str, code: str
) -> None:
    failing_server.takes_tokens = "vllm" in settings.values()
    async with client(f"{failing_server.url}/", **settings) as server:
        await server.connect(patience=1)
        with raises(InferenceError, code):
            await server.generate(ASK)
    assert failing_server.asked[-1] == path


async def test_path_of_an_openai_server_is_kept(failing_server: FailingServer) -> None:
    async with client(f"{failing_server.url}/beta/openai", server_type="openai", model_name="m") as server:
        assert (await server.connect(patience=1)).name == "m"  # without a list of models, the name is trusted
        with raises(InferenceError, "request_refused", status=404):
            await server.generate(ASK)
    assert failing_server.asked == ["/beta/openai/models", "/beta/openai/chat/completions"]
