"""What is said when a model server cannot be used. (That it works is tested against a real vLLM.)"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tests.unit.env.conftest import FailingServer

from gristmill import Manifest
from gristmill_env.errors import InferenceError

from .conftest import ASK, CHAT, GENERATE, answers, choice, client


async def test_an_unreachable_server_is_named_with_how_long_it_was_tried() -> None:
    async with client("http://127.0.0.1:1") as server:
        started = time.monotonic()
        with pytest.raises(
            InferenceError, match=r"http://127\.0\.0\.1:1 did not answer for \d s \(/v1/models: .*running"
        ):
            await server.connect(patience=1.2)
        assert time.monotonic() - started >= 1.2


async def test_another_model_names_the_line_to_change(failing_server: FailingServer) -> None:
    async with client(failing_server, model_name="smollm2") as server:
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
    assert (served.name, served.max_model_len, served.text_only) == ("tiny", 1024, False)


async def test_a_catalogue_of_models_wants_a_name(failing_server: FailingServer) -> None:
    failing_server.answers["/v1/models"] = lambda: (200, {"data": [{"id": "a"}, {"id": "b"}, {"id": "c"}]})
    async with client(failing_server) as server:
        with pytest.raises(InferenceError, match="serves 'a' and 2 more; set model_name"):
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
        with pytest.raises(InferenceError, match=r"training needs token ids.*--enable-scale-out"):
            await server.generate(ASK)


async def test_a_text_server_is_known_and_refused_for_training(failing_server: FailingServer) -> None:
    failing_server.takes_tokens = False
    async with client(failing_server) as server:
        assert (await server.connect(patience=1)).text_only
        with pytest.raises(InferenceError, match=r"gives text only; training needs token ids.*--enable-scale-out"):
            server.refuse_text_only()
    async with client(failing_server, server_type="vllm") as server:
        with pytest.raises(InferenceError, match=r"has no /inference/v1/generate; training needs token ids"):
            await server.connect(patience=1)


async def test_server_type_openai_takes_text_of_a_server_that_has_token_ids(failing_server: FailingServer) -> None:
    async with client(failing_server, server_type="openai") as server:
        assert (await server.connect(patience=1)).text_only
        with pytest.raises(InferenceError, match="gives text only"):
            server.refuse_text_only()
    async with client(failing_server) as server:
        assert not (await server.connect(patience=1)).text_only
        server.refuse_text_only()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((200, {"choices": [choice(token_ids=[6])]}), "log-probabilities of other tokens"),
        ((200, {"choices": [choice()] * 2}), "returned 2 of 1 completions"),
        ((200, {"text": "hello"}), "does not answer .* as it should"),
        ((400, {"error": {"message": "prompt is longer than 1024"}}), "HTTP 400.*prompt is longer than 1024"),
        ((404, {"error": {"message": "The model `x` does not exist."}}), "HTTP 404.*does not exist"),
        ((401, {"error": "no"}), "set api_key"),
    ],
)
async def test_a_refusal_is_told_at_once(failing_server: FailingServer, answer: tuple[int, Any], message: str) -> None:
    failing_server.answers[GENERATE] = lambda: answer
    async with client(failing_server, patience=30) as server:
        await server.connect(patience=1)
        with pytest.raises(InferenceError, match=message):
            await server.generate(ASK)
    assert failing_server.asked.count(GENERATE) == 1


@pytest.mark.parametrize(
    "answer", [(500, {"error": "engine died"}), (200, {"choices": [choice(finish_reason="abort")]})]
)
async def test_a_server_in_trouble_is_asked_again_until_patience_ends(
    failing_server: FailingServer, answer: tuple[int, Any]
) -> None:
    failing_server.answers[GENERATE] = lambda: answer
    async with client(failing_server, patience=2.0) as server:
        await server.connect(patience=1)
        with pytest.raises(InferenceError, match=rf"did not answer for [2-9] s \({GENERATE}: (HTTP 500|.*'abort')"):
            await server.generate(ASK)
    assert failing_server.asked.count(GENERATE) >= 3


async def test_a_server_that_asks_for_time_gets_it(failing_server: FailingServer) -> None:
    failing_server.answers[GENERATE] = lambda: (429, {}) if len(failing_server.bodies) == 1 else answers(choice())
    failing_server.headers["Retry-After"] = "1.5"
    async with client(failing_server, patience=30) as server:
        await server.connect(patience=1)
        started = time.monotonic()
        await server.generate(ASK)
        assert time.monotonic() - started >= 1.5
    assert failing_server.asked.count(GENERATE) == 2


@pytest.mark.parametrize(
    ("settings", "path"), [({}, CHAT), ({"server_type": "openai"}, CHAT), ({"server_type": "vllm"}, GENERATE)]
)
async def test_where_an_address_without_a_path_is_asked(
    failing_server: FailingServer, settings: dict[str, Any], path: str
) -> None:
    failing_server.takes_tokens = "vllm" in settings.values()
    async with client(f"{failing_server.url}/", **settings) as server:
        await server.connect(patience=1)
        with pytest.raises(InferenceError, match=r"HTTP 404|has no"):
            await server.generate(ASK)
    assert failing_server.asked[-1] == path


async def test_an_openai_servers_own_path_is_kept(failing_server: FailingServer) -> None:
    async with client(f"{failing_server.url}/beta/openai", server_type="openai", model_name="m") as server:
        assert (await server.connect(patience=1)).name == "m"  # no list of models there: the name is taken at its word
        with pytest.raises(InferenceError, match="HTTP 404"):
            await server.generate(ASK)
    assert failing_server.asked == ["/beta/openai/models", "/beta/openai/chat/completions"]


def test_no_manifest_is_no_error_here(tmp_path: Path) -> None:
    from gristmill_env.prepare import read_manifest

    assert read_manifest(tmp_path) is None
