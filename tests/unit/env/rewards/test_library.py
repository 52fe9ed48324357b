"""Rewards as a library: two lines, without a user's event loop, with errors that are raised."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest
from tests.support.errors import raises

from gristmill_env.errors import RewardError
from gristmill_env.rewards import Sample, create_reward


def test_reward_scores_completions_in_two_lines() -> None:
    reward = create_reward({"type": "accuracy"})
    assert reward.score(["... \\boxed{72}"], answer="#### 72") == [1.0]


async def test_reward_can_be_scored_while_an_event_loop_runs() -> None:
    async def judge(completion: str) -> float:
        await asyncio.sleep(0)
        return float(len(completion))

    assert create_reward(judge).score(["a", "ab"]) == [1.0, 2.0]


def test_rewards_may_score_by_other_rewards() -> None:
    right = create_reward("accuracy")

    async def half(completion: str, answer: str) -> float:
        return (right.score([completion], answer=answer)[0] or 0.0) / 2

    halved = create_reward(half)

    async def quarter(completion: str, answer: str) -> float:
        return (halved.score([completion], answer=answer)[0] or 0.0) / 2

    assert create_reward(quarter).score(["#### 4", "#### 5"], answer="4") == [0.25, 0.0]


def test_reward_input_is_shared_or_given_per_completion() -> None:
    def compares(completion: str, answer: str, level: int = 1) -> float:
        return level * float(completion == answer)

    reward = create_reward(compares)
    assert reward.score(["4", "5"], answer="4") == [1.0, 0.0]
    assert reward.score(["4", "5"], answer=["4", "5"], level=2) == [2.0, 2.0]
    assert reward.score(["4", "5"], answer=4, level=[1, 3]) == [1.0, 0.0]
    assert reward.score([], answer="4") == []


def test_reward_gets_rows_messages_and_plural_inputs() -> None:
    def of_row(completion: str, row: dict[str, list[str]], messages: list[dict[str, str]]) -> float:
        return len(row["tests"]) + len(messages)

    def of_group(completions: list[str], answers: list[str]) -> list[float]:
        return [float(a == b) for a, b in zip(completions, answers, strict=True)]

    messages = [{"role": "user", "content": "?"}]
    assert create_reward(of_row).score(["", ""], row={"tests": ["a", "b", "c"]}, messages=messages) == [4.0, 4.0]
    assert create_reward(of_group).score(["4", "5"], answers=["4", "4"]) == [1.0, 0.0]
    assert create_reward(of_group).score(["4", "5"], answer="5") == [0.0, 1.0]


def test_reward_scores_samples_instead_of_texts() -> None:
    reward = create_reward("length", {"target_tokens": 4})
    assert reward.score(Sample("", tokens=[1, 2])) == 0.5
    assert reward.score([Sample("", tokens=[1, 2]), Sample("", tokens=[1])]) == [0.5, 0.25]
    assert reward.score(["", ""], tokens=[[1, 2], [1]]) == [0.5, 0.25]


def test_reward_without_a_value_returns_none() -> None:
    assert create_reward("accuracy").score(["4"], answer="Paris is a city") in ([None], [0.0])
    assert create_reward(lambda completion: None, name="silent").score(["4"]) == [None]


def same(completions: list[str], answer: str) -> list[float]:
    return [1.0] * len(completions)


def test_failing_reward_raises_an_error_with_its_cause() -> None:
    reward = create_reward(lambda completion: 1 / 0, name="broken")
    with raises(RewardError, "reward_raised", error="ZeroDivisionError") as error:
        reward.score(["4"])
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_score_refuses_invalid_inputs_with_their_codes() -> None:
    reward = create_reward("accuracy")
    with raises(RewardError, "no_answer_field", reward="accuracy"):
        reward.score(["4"])
    with raises(RewardError, "length_mismatch", reward="accuracy", field="answer"):
        reward.score(["4", "5"], answer=["4"])
    with raises(RewardError, "completions_not_a_list", reward="accuracy"):
        reward.score("4", answer="4")
    with raises(RewardError, "completion_not_text", at=1):
        reward.score(["4", None], answer="4")  # type: ignore[list-item]
    with raises(RewardError, "input_differs", input="answer"):
        create_reward(same).score(["4", "5"], answer=["4", "5"])
    with raises(RewardError, "samples_and_inputs"):
        reward.score([Sample("4")], answer="4")


LIGHT = """
import sys
from gristmill_env.rewards import create_reward
print(create_reward({"type": "accuracy"}).score(["... \\\\boxed{72}"], answer="#### 72"))
print([name for name in ("torch", "transformers", "datasets", "sympy", "trl", "wandb") if name in sys.modules])
"""


@pytest.mark.slow
def test_importing_rewards_is_light_and_the_process_exits_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, others = os.environ["PYTHONPATH"].partition("no_torch")  # The process could import torch.
    monkeypatch.setenv("PYTHONPATH", others.lstrip(os.pathsep))
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[1.0]\n[]\n", "")
