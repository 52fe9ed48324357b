"""One request to a real vLLM, by token ids and by text."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator

import pytest
from tests.support.errors import raises
from tests.support.stack import Vllm

from gristmill import Manifest, SamplingParams
from gristmill_env.errors import PromptRefusedError
from gristmill_env.inference import GenerationRequest, ModelServers, ServedModel
from gristmill_env.rollouts.prompts import PromptBuilder, load_tokenizer
from gristmill_env.settings.servers import ServerConfig

SAMPLING = SamplingParams(temperature=1.0, max_tokens=24)


@pytest.fixture
def prompts(vllm: Vllm) -> PromptBuilder:
    return PromptBuilder(load_tokenizer(Manifest.read(vllm.models_dir).tokenizer_path))


@pytest.fixture
def question(prompts: PromptBuilder) -> GenerationRequest:
    """The tiny model answers "<answer>7</answer>", "It is 7." and the like."""
    text = "What is 3 + 4?"
    return GenerationRequest(
        token_ids=prompts.build(text).token_ids,
        messages=[{"role": "user", "content": text}],
        sampling=SAMPLING,
        count=16,
    )


@pytest.fixture
async def server(vllm: Vllm) -> AsyncIterator[ModelServers]:
    async with ModelServers([ServerConfig(base_url=vllm.url)], patience=30) as servers:
        await servers.connect(patience=30)
        yield servers


@pytest.fixture
async def text_server(vllm: Vllm) -> AsyncIterator[ModelServers]:
    """The same server by its OpenAI-compatible route."""
    async with ModelServers([ServerConfig(base_url=vllm.url, server_type="openai")], patience=30) as servers:
        await servers.connect(patience=30)
        yield servers


async def test_connect_detects_that_vllm_returns_token_ids(vllm: Vllm) -> None:
    manifest = Manifest.read(vllm.models_dir)
    expected = {"auto": False, "vllm": False, "openai": True}
    for kind, text_only in expected.items():
        config = ServerConfig.model_validate({"base_url": vllm.url, "server_type": kind})
        async with ModelServers([config], patience=30) as servers:
            served = await servers.connect(patience=30)
        assert served == ServedModel("tiny", manifest.serve_path, manifest.max_model_len, text_only)


async def test_a_stop_text_ends_a_completion_and_stays_in_it(
    server: ModelServers, prompts: PromptBuilder, question: GenerationRequest
) -> None:
    # "er>" is the inside of the tokens <answer> and </answer>; "is" is two tokens, or the inside of "assistant\n".
    request = GenerationRequest(token_ids=question.token_ids, sampling=SAMPLING, count=128, stop=["er>", "is"])
    texts = []
    for completion in await server.generate(request):
        text = prompts.decode(completion.token_ids)
        texts.append(text)
        before = prompts.decode(completion.token_ids[:-1])
        assert not any(stop in before for stop in request.stop), "generation continued after the stop text"
        assert len(completion.logprobs) == len(completion.token_ids)
        assert max(completion.logprobs) <= 0
        assert completion.finish_reason == "stop"
    assert {text[-3:] for text in texts} >= {"er>"}
    assert any(text.endswith("is") for text in texts)


async def test_a_stop_token_ends_a_completion_and_stays_in_it(
    server: ModelServers, prompts: PromptBuilder, question: GenerationRequest
) -> None:
    seven = next(token for token in prompts.build("7").token_ids if prompts.decode([token]) == "7")
    request = GenerationRequest(token_ids=question.token_ids, sampling=SAMPLING, count=32, stop_token_ids=[seven])
    ended = 0
    for completion in await server.generate(request):
        assert seven not in completion.token_ids[:-1]
        ended += completion.token_ids[-1] == seven
    assert ended > 10


async def test_max_tokens_cuts_a_completion(server: ModelServers, question: GenerationRequest) -> None:
    cut = SamplingParams(temperature=1.0, max_tokens=1)
    whole = await server.generate(question)
    [end] = {completion.token_ids[-1] for completion in whole if completion.finish_reason == "stop"}
    cuts = await server.generate(GenerationRequest(token_ids=question.token_ids, sampling=cut, count=32))
    # One completion in 1,800 begins with the end of the turn, and stops without more tokens.
    assert {(c.length, c.finish_reason) for c in cuts if c.token_ids != [end]} == {(1, "length")}
    for completion in whole:
        assert completion.length is not None
        assert completion.finish_reason == "stop" or completion.length == 24


async def test_log_probabilities_are_those_of_the_distribution_that_was_sampled(
    server: ModelServers, question: GenerationRequest
) -> None:
    """At temperature T, log p_T(x) - log p_T(y) = (log p_1(x) - log p_1(y)) / T, and only at that temperature."""

    async def first_tokens(temperature: float) -> dict[int, float]:
        sampling = SamplingParams(temperature=temperature, max_tokens=1)
        request = GenerationRequest(token_ids=question.token_ids, sampling=sampling, count=64)
        return {c.token_ids[0]: c.logprobs[0] for c in await server.generate(request)}

    plain, cold = await first_tokens(1.0), await first_tokens(0.5)
    shared = sorted(set(plain) & set(cold))
    assert len(shared) >= 2
    for one in shared[1:]:
        zero = shared[0]
        assert cold[one] - cold[zero] == pytest.approx((plain[one] - plain[zero]) / 0.5, abs=1e-3)
    assert math.fsum(math.exp(value) for value in cold.values()) <= 1 + 1e-4


async def test_openai_route_returns_text_without_token_ids(
    text_server: ModelServers, question: GenerationRequest
) -> None:
    completions = await text_server.generate(question.with_count(64))
    assert len(completions) == 64
    assert all(c.token_ids == [] and c.labels == [] for c in completions)
    assert sum(bool(c.text) for c in completions) >= 48, "except those that begin with the end of the turn"
    assert any(c.text == "<answer>7</answer>" for c in completions)
    [one] = await text_server.generate(question.with_count(1))
    assert one.length is not None
    assert 1 <= one.length <= 24


async def test_text_route_supports_prefill_and_stop_texts_of_vllm(
    text_server: ModelServers, question: GenerationRequest
) -> None:
    request = GenerationRequest(
        messages=question.messages, prefill="<answer>", sampling=SAMPLING, count=16, stop=["er>"]
    )
    texts = [c.text for c in await text_server.generate(request)]
    assert "7</answer>" in texts  # the server continued at the end of the prefill, and kept the stop text
    cut = SamplingParams(temperature=1.0, max_tokens=1)
    request = GenerationRequest(messages=question.messages, sampling=cut, count=16)
    assert sum(c.finish_reason == "length" for c in await text_server.generate(request)) >= 12


async def test_too_long_prompt_is_an_error_of_its_row_with_the_servers_message(
    server: ModelServers, question: GenerationRequest
) -> None:
    request = GenerationRequest(token_ids=list(question.token_ids) * 400, sampling=SAMPLING)
    with raises(PromptRefusedError, "request_refused", status=400, path="/inference/v1/generate") as raised:
        await server.generate(request)
    assert "2048" in str(raised.value)
