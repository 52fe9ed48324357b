"""cosine_scaled: the arithmetic, the cache and the errors, against a server with vectors known by hand."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.embeddings_server import LettersServer
from tests.support.errors import raises
from tests.support.scoring import scored

from gristmill_env.errors import RewardError
from gristmill_env.rewards import Sample, Scorer, WeightedReward, create_reward, embeddings, remote
from gristmill_env.rewards.embeddings import cosine_distance
from gristmill_env.settings.run import EnvConfig

pytestmark = pytest.mark.slow

KEY = "sk-do-not-tell"


@pytest.fixture
def server() -> Iterator[LettersServer]:
    embeddings._answers.clear()  # a port may be used again
    server = LettersServer()
    yield server
    server.close()


def similarity(server: LettersServer, completion: str, answer: str, **params: Any) -> float | None:
    return scored("cosine_scaled", {"base_url": f"{server.url}/v1", **params}, completion, answer=answer)


@pytest.mark.parametrize(
    ("completion", "answer", "params", "score"),
    [
        ("ab", "ab", {}, 1.0),
        ("abab", "ab", {}, 1.0),  # the same direction
        ("a", "ab", {}, math.sqrt(0.5)),
        ("a", "b", {}, 0.0),
        ("a", "b", {"scale_factor": 0.5}, 0.5),
        ("a", "b", {"scale_factor": 9}, -1.0),
        ("a", "b", {"scale_factor": 9, "min_reward": -2}, -2.0),
        ("a", "b", {"min_reward": 0.25}, 0.25),
        ("ab", "ab", {"max_reward": 0.5}, 0.5),
        ("ab", "ab", {"min_reward": 0.5, "max_reward": -0.5}, 0.5),  # swapped
        ("a", "b", {"scale_factor": 9, "min_reward": 0.5, "max_reward": -0.5}, -0.5),
        ("abzz", "ab", {"max_characters": 2}, 1.0),
        (" ", "ab", {}, -1.0),
        ("", "ab", {"min_reward": -3}, -3.0),
        ("ab", " ", {}, None),  # nothing to compare with
    ],
)
def test_cosine_scaled_is_one_minus_the_scaled_distance(
    server: LettersServer, completion: str, answer: str, params: dict[str, Any], score: float | None
) -> None:
    assert similarity(server, completion, answer, **params) == (None if score is None else pytest.approx(score))


def test_cosine_scaled_sends_openai_requests(server: LettersServer) -> None:
    similarity(server, "a", "ab", model_name="minilm", api_key=KEY)
    assert server.asked == [
        {"path": "/v1/embeddings", "model": "minilm", "input": ["a", "ab"], "encoding_format": "float"}
    ]
    assert server.authorization == [f"Bearer {KEY}"]


def test_cosine_scaled_address_may_omit_v1_and_the_key(server: LettersServer) -> None:
    assert scored("cosine_scaled", {"base_url": server.url}, "a", answer="a") == pytest.approx(1.0)
    assert server.asked[0]["path"] == "/v1/embeddings"
    assert server.authorization == [None]


def test_cosine_scaled_embeds_an_answer_once(server: LettersServer) -> None:
    for completion in ("a", "b", "ab"):
        similarity(server, completion, "ab")
    assert [request["input"] for request in server.asked] == [["a", "ab"], ["b"], ["ab"]]


def test_cosine_scaled_embeds_only_the_completions_of_a_later_group(server: LettersServer) -> None:
    reward = create_reward("cosine_scaled", {"base_url": server.url})
    for _ in range(2):
        server.asked.clear()
        reward.score(["a", "b", "ab", "ba"], answer="ab")
    assert sorted(request["input"] for request in server.asked) == [["a"], ["ab"], ["b"], ["ba"]]


def test_cosine_scaled_caches_per_model(server: LettersServer) -> None:
    similarity(server, "a", "ab", model_name="one")
    similarity(server, "a", "ab", model_name="other")
    assert [request["input"] for request in server.asked] == [["a", "ab"], ["a", "ab"]]


async def test_cosine_scaled_does_not_mix_answers_of_concurrent_samples(server: LettersServer) -> None:
    reward: Any = create_reward("cosine_scaled", {"base_url": server.url})
    texts = ["a", "b", "c", "d"]
    samples = [Sample(completion, answer=answer) for completion in texts for answer in texts]
    for _ in range(2):  # the second time from the cache
        said = await asyncio.gather(*(asyncio.to_thread(reward.score, sample) for sample in samples))
        assert said == pytest.approx([float(sample.completion == sample.answer) for sample in samples])


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_cosine_scaled_retries_a_server_that_fails_briefly(server: LettersServer, status: int) -> None:
    server.replies = [(status, {"error": "busy"})]
    assert similarity(server, "a", "a") == pytest.approx(1.0)
    assert len(server.asked) == 2


@pytest.mark.parametrize(("status", "remedy"), [(401, "api_key"), (404, "model_name"), (400, "max_characters")])
def test_cosine_scaled_reports_a_refusal_with_the_remedy_and_does_not_retry(
    server: LettersServer, status: int, remedy: str
) -> None:
    server.replies = [(status, {"error": {"message": "no"}})]
    with raises(RewardError, "reward_server_refused", url=f"{server.url}/v1/embeddings", status=status) as raised:
        similarity(server, "a", "a")
    assert remedy in str(raised.value)
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ({"data": []}, "embeddings_incomplete"),
        ({"data": [{"index": 0, "embedding": [1.0]}] * 2}, "embeddings_incomplete"),
        (
            {"data": [{"index": 0, "embedding": [1.0]}, {"index": 1, "embedding": [1.0, 2.0]}]},
            "embeddings_incomplete",
        ),
        (
            {"data": [{"index": 0, "embedding": [0.0]}, {"index": 1, "embedding": [1.0]}]},
            "embedding_without_direction",
        ),
        ({"data": [{"index": 0, "embedding": "AACAPw=="}]}, "embeddings_invalid"),
        ({"object": "list"}, "embeddings_invalid"),
    ],
)
def test_cosine_scaled_invalid_answer_is_an_error(server: LettersServer, reply: Any, code: str) -> None:
    server.replies = [(200, reply)]
    with raises(RewardError, code):
        similarity(server, "a", "b")


def test_cosine_scaled_refuses_a_cached_vector_of_another_length(server: LettersServer) -> None:
    similarity(server, "a", "ab")
    server.replies = [(200, {"data": [{"index": 0, "embedding": [1.0]}]})]  # another model under the same name
    with raises(RewardError, "embedding_sizes", sizes=[1, 26]):
        similarity(server, "a", "ab")


def test_cosine_scaled_error_names_an_unreachable_server(server: LettersServer) -> None:
    server.close()
    with raises(RewardError, "reward_server_unreachable", url=f"{server.url}/v1/embeddings"):
        similarity(server, "a", "b")


async def test_run_waits_for_an_embeddings_server_that_is_away(
    server: LettersServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_CALLS", 2)
    server.replies = [(503, {"error": "starting"})] * 4  # two calls with two requests each
    made = create_reward("cosine_scaled", {"base_url": server.url})
    async with Scorer([WeightedReward(made, 1.0)], has_answer=True, patience=60) as scorer:
        [score] = await scorer.score([Sample("a", answer="a")])
    assert score.total == pytest.approx(1.0)
    assert score.error is None
    assert len(server.asked) == 5


async def test_embeddings_server_that_stays_away_ends_the_run_after_the_patience(
    server: LettersServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_CALLS", 2)
    server.close()
    made = create_reward("cosine_scaled", {"base_url": server.url})
    async with Scorer([WeightedReward(made, 1.0)], has_answer=True, patience=0.5) as scorer:
        with raises(RewardError, "service_unavailable", name="cosine_scaled") as raised:
            await scorer.score([Sample("a", answer="a")])
    assert raised.value.values["seconds"] >= 0.5


@pytest.mark.parametrize("params", [{}, {"local": True, "base_url": "http://localhost:1"}])
def test_cosine_scaled_requires_either_server_or_local(params: dict[str, Any]) -> None:
    with raises(RewardError, "embeddings_source"):
        create_reward("cosine_scaled", params)


def test_cosine_scaled_refuses_an_address_without_http_at_the_start() -> None:
    with raises(RewardError, "parameter_invalid", parameter="base_url"):
        create_reward("cosine_scaled", {"base_url": "localhost:8080"})


def test_cosine_scaled_local_without_its_package_names_it_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [])  # no module is found that is not imported yet
    with raises(RewardError, "package_missing", extra="embeddings") as raised:
        create_reward("cosine_scaled", {"local": True})
    assert 'pip install "sentence-transformers>=3"' in str(raised.value)


def test_cosine_scaled_sends_the_key_only_to_the_server(
    server: LettersServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    params = {"base_url": server.url, "api_key": KEY, "scale_factor": 2.0}
    reward: Any = create_reward("cosine_scaled", params)
    server.replies = [(401, {"error": "no"})]
    with pytest.raises(RewardError) as error:
        reward.score(Sample("a", answer="b"))
    alone = {"type": "cosine_scaled", "params": params}
    inside = {"type": "combined", "params": {"rewards": [alone, "length"]}}
    config = EnvConfig.model_validate({"dataset": {"reward_functions": [alone, inside]}})
    recorded = config.recorded("tiny")
    assert recorded["dataset"]["reward_functions"] == [
        {"type": "cosine_scaled", "weight": 1.0, "params": {"scale_factor": 2.0}},
        {
            "type": "combined",
            "weight": 1.0,
            "params": {"rewards": [{"type": "cosine_scaled", "params": {"scale_factor": 2.0}}, "length"]},
        },
    ]
    assert KEY not in f"{recorded} {error.value} {error.value.values} {reward!r} {caplog.text}"
    assert server.authorization == [f"Bearer {KEY}"]


_VECTOR = st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=3).filter(lambda row: max(map(abs, row)) > 1e-3)


@given(vector=_VECTOR, other=_VECTOR)
def test_cosine_distance_is_symmetric_and_between_zero_and_two(vector: list[float], other: list[float]) -> None:
    one, two = np.array([vector, other])
    there, back = cosine_distance(one, two), cosine_distance(two, one)
    assert -1e-9 <= there <= 2 + 1e-9
    assert there == pytest.approx(back, abs=1e-9)
    assert cosine_distance(one, 3 * one) == pytest.approx(0, abs=1e-9)
