"""cosine_scaled against a real vLLM that embeds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from tests.support.errors import raises
from tests.support.ports import free_port
from tests.support.scoring import scored
from tests.support.stack import EMBEDDINGS_KEY, MODELS_DIR, Output, start_embeddings

from gristmill_cli.local.processes import LocalStack
from gristmill_env.errors import RewardError
from gristmill_model.resolve import resolve

ANSWER = "What is 2 + 3?"


pytestmark = pytest.mark.long  # a separate model server


@pytest.fixture(scope="module")
def params() -> Iterator[dict[str, Any]]:
    """Returns options that name the server."""
    port = free_port()
    with LocalStack(Output().add) as stack:
        start_embeddings(stack, resolve("tiny", MODELS_DIR).weights_path, port)
        yield {"base_url": f"http://127.0.0.1:{port}/v1", "model_name": "tiny", "api_key": EMBEDDINGS_KEY}


def test_cosine_scaled_scores_nearer_meanings_higher(params: dict[str, Any]) -> None:
    same, near, far = (
        scored("cosine_scaled", params, text, answer=ANSWER) for text in (ANSWER, "What is 2 + 4?", "A banana.")
    )
    assert same == pytest.approx(1.0, abs=1e-5)
    assert near is not None
    assert far is not None
    assert 1.0 > near > far


def test_cosine_scaled_score_matches_the_servers_embeddings(params: dict[str, Any]) -> None:
    headers, body = {"Authorization": f"Bearer {EMBEDDINGS_KEY}"}, {"model": "tiny", "input": [ANSWER, "A banana."]}
    found = httpx.post(f"{params['base_url']}/embeddings", json=body, headers=headers, timeout=60).json()["data"]
    one, other = (np.array(item["embedding"]) for item in found)
    cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
    assert scored("cosine_scaled", {**params, "scale_factor": 0.5}, "A banana.", answer=ANSWER) == pytest.approx(
        1 - 0.5 * (1 - cosine), abs=1e-5
    )


def test_cosine_scaled_refuses_a_too_long_text_unless_max_characters_cuts_it(params: dict[str, Any]) -> None:
    long = "a banana " * 100
    with raises(RewardError, "reward_server_refused", status=400) as raised:
        scored("cosine_scaled", params, long, answer=ANSWER)
    assert "max_characters" in str(raised.value)
    assert scored("cosine_scaled", {**params, "max_characters": 60}, long, answer=ANSWER) is not None


def test_cosine_scaled_names_a_wrong_api_key(params: dict[str, Any]) -> None:
    with raises(RewardError, "reward_server_refused", status=401) as raised:
        scored("cosine_scaled", {**params, "api_key": "sk-wrong"}, "A banana.", answer=ANSWER)
    assert "api_key" in str(raised.value)


def test_cosine_scaled_names_a_wrong_model_name(params: dict[str, Any]) -> None:
    with raises(RewardError, "reward_server_refused", status=404) as raised:
        scored("cosine_scaled", {**params, "model_name": "large"}, "A banana.", answer=ANSWER)
    assert "model_name" in str(raised.value)
