"""From completions to their records, with real rewards: the votes, the right answers and the failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gristmill import SamplingParams
from gristmill_env.data import Item
from gristmill_env.evaluation.folder import judged
from gristmill_env.evaluation.results import Summary, summarise
from gristmill_env.rewards import Sample, Scorer, WeightedReward, create_reward
from gristmill_env.rollouts.groups import Rollout, RolloutGroup
from gristmill_env.rollouts.prompts import Prompt

from .made import plan


def rollout(text: str) -> Rollout:
    prompt = Prompt("?", (1,), ())
    return Rollout(prompt, [1, 2], [0.0, 0.0], [True, True], [], text, (), "stop", 1, 2)


async def summary(
    rewards: Sequence[Any],
    completions: Sequence[str],
    answer: str,
    row: Mapping[str, Any] | None = None,
    tokens: Sequence[int] | None = (1, 2),
) -> Summary:
    """The values of one prompt. `rewards`: of weight 1, or (reward, weight)."""
    pairs = [one if isinstance(one, tuple) else (one, 1.0) for one in rewards]
    weighted = [WeightedReward(create_reward(one), weight) for one, weight in pairs]
    columns = dict(row or {})
    item = Item(0, 0, "?", answer, columns)
    async with Scorer(weighted, has_answer=True, columns=[*columns]) as scorer:
        scores = await scorer.score([Sample(text, answer=answer, tokens=tokens, row=columns) for text in completions])
        correctness = scorer.correctness
        made = plan(samples=len(completions), decides=correctness.name, compares=correctness.compares)
        group = RolloutGroup(
            item, SamplingParams(temperature=1.0, max_tokens=8), [rollout(text) for text in completions], scores, 1.0
        )
        return summarise(made, [await judged(group, scorer, made)])


def majority(found: Summary) -> float:
    assert found.majority is not None
    return found.majority.value


async def test_unmarked_answers_vote_if_the_reward_accepts_them() -> None:
    found = await summary(
        [{"type": "accuracy", "params": {"last_number": True}}], ["it is 72"] * 2 + ["it is 71"] * 6, "72"
    )
    assert (majority(found), found.unextracted) == (0.0, 0.0)
    assert found.passes[1].value == 0.25


async def test_records_count_equal_wrong_choices_as_one_candidate() -> None:
    said = ["answer: A", "answer: A", "<answer>(B)</answer>", "<answer>B) Paris</answer>", "Answer: B"]
    found = await summary(["mcq"], said, "A", {"choices": ["Oslo", "Paris", "Rome"]})
    assert (majority(found), found.unextracted) == (0.0, 0.0)


async def test_records_count_equal_wrong_mathematics_as_one_candidate() -> None:
    found = await summary(
        ["accuracy"], ["#### 2", "#### 2", r"#### $\sqrt2$", r"\boxed{\sqrt{2}}", r"#### \sqrt 2"], "2"
    )
    assert majority(found) == 0.0


async def test_correctness_uses_the_parts_of_a_combination_and_not_its_sum() -> None:
    half = {
        "type": "combined",
        "params": {"rewards": [{"type": "accuracy", "weight": 0.5}, {"type": "format", "weight": 0}]},
    }
    found = await summary([half], ["#### 2", "#### 3"], "2")
    assert (found.passes[1].value, found.passes[2].value) == (0.5, 1.0)
    found = await summary(["r1"], ["<answer>3</answer>", "#### 2"], "2")
    assert found.passes[1].value == 0.5


async def test_correctness_uses_a_judge_that_reads_the_ground_truth() -> None:
    def judge(completion: str, ground_truth: str) -> float:
        return float(completion.endswith(ground_truth))

    found = await summary(["format", judge], ["<answer>3</answer>", "it is 2"], "2")
    assert found.passes[1].value == 0.5
    assert found.unextracted == 0.0


async def test_every_failure_is_counted_with_the_reward_that_failed() -> None:
    """A second failing reward, a part, a reward with parts, and a metric: each has its own entry, and none is a
    skip."""
    part = {"type": "combined", "params": {"rewards": [{"type": "cosine_length", "params": {"max_tokens": 9}}]}}
    metric = {"type": "soft_overlong", "params": {"max_tokens": 9}}
    found = await summary(["accuracy", "length", part, (metric, 0.0)], ["#### 2"], "2", tokens=None)
    for name in ("length", "combined", "combined/cosine_length", "soft_overlong"):
        assert (found.rewards[name].errors, found.rewards[name].skipped) == (1, 0), name
    assert (found.rewards["accuracy"].errors, found.rewards["accuracy"].count, found.rewards["total"].errors) == (
        0,
        1,
        1,
    )
    only = await summary(["accuracy", (metric, 0.0)], ["#### 2"], "2", tokens=None)
    assert (only.rewards["soft_overlong"].errors, only.rewards["total"].errors) == (1, 0)
