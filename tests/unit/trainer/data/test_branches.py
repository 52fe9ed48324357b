"""Groups of rollouts with branches: the baseline, the penalties, the filter and the statistics count rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.support.groups import make_group
from tests.unit.trainer.data.bad import limits

from gristmill import SamplingParams, TrajectoryGroup
from gristmill.hyperparameters import Hyperparameters
from gristmill_trainer.data.advantages import Scale
from gristmill_trainer.data.samples import to_samples
from gristmill_trainer.data.types import Reason, Sample, rollouts_of

ROLLOUTS = [0, 0, 0, 1, 2, 2]
REWARDS = [1.0, 1.0, 1.0, 0.25, 0.0, 0.0]


def with_branches(**changes: Any) -> TrajectoryGroup:
    """Three rollouts of three, one and two branches."""
    group = make_group(lengths=[(3, 2)] * 6, rewards=REWARDS, rollouts=ROLLOUTS, version="1.5")
    return replace(group, **changes)


def without_branches(name: str = "g00000001", rewards: Sequence[float] = (1.0, 0.25, 0.0)) -> TrajectoryGroup:
    return make_group(name, lengths=[(3, 2)] * len(rewards), rewards=rewards, version="1.5")


def advantages(samples: Sequence[Sample]) -> list[float]:
    return [float(sample.advantages[-1]) for sample in samples]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_of_branches_are_the_advantages_of_their_rollouts(scale: Scale) -> None:
    settings, other = Hyperparameters(advantage_scale=scale), without_branches("g00000002", (3.0, 1.0))
    found = to_samples([with_branches(), other], limits(), settings)
    expected = to_samples([without_branches(), other], limits(), settings)
    one, two, three, four, five = advantages(expected.samples)
    assert advantages(found.samples) == [one, one, one, two, three, three, four, five]
    assert [sample.rollout for sample in found.samples] == [*ROLLOUTS, None, None]
    assert rollouts_of(found.samples).tolist() == [*ROLLOUTS, 3, 4]
    for name in ("sequences", "reward_mean", "reward_std", "reward_parts"):
        assert getattr(found.statistics, name) == getattr(expected.statistics, name), name
    assert found.statistics.completion_tokens_mean == (12 + 4) / 5


def test_advantage_of_a_single_rollout_with_branches_equals_its_reward() -> None:
    group = make_group(lengths=[(3, 2)] * 3, rewards=[0.25] * 3, rollouts=[0, 0, 0], version="1.5")
    assert advantages(to_samples([group], limits(), Hyperparameters()).samples) == [0.25] * 3


def test_filter_removes_all_branches_of_a_rollout_of_which_one_was_truncated() -> None:
    group = with_branches(finish_reasons=["stop", "length", "length", "stop", "stop", "stop"])
    found = to_samples([group], limits(), Hyperparameters(overlong="filter"))
    assert [sample.trained_tokens for sample in found.samples] == [0, 0, 0, 2, 2, 2]
    assert found.statistics.overlong_filtered == 1
    assert found.statistics.cut_off_share == pytest.approx(1 / 3)


def test_length_penalty_counts_the_longest_reply_of_any_branch_once() -> None:
    group = replace(
        make_group(lengths=[(3, 4), (3, 8), (3, 4)], rewards=[1, 1, 1], rollouts=[0, 0, 1], version="1.5"),
        sampling=SamplingParams(temperature=1.0, max_tokens=8),
    )
    settings = Hyperparameters(advantage_scale="none", overlong_buffer=4, overlong_penalty=0.6)
    found = to_samples([group], limits(), settings)
    np.testing.assert_allclose(advantages(found.samples), [-0.3, -0.3, 0.3], atol=1e-7)
    assert found.statistics.overlong_punished == 1


def test_dropped_branch_leaves_the_other_branches_and_the_baseline() -> None:
    group = with_branches(tokens=np.where(np.arange(30) == 2, 64, with_branches().tokens).astype(np.int32))
    found = to_samples([group], limits(), Hyperparameters())
    assert [(one.sequence, one.reason) for one in found.rejected] == [(0, Reason.OUTSIDE_VOCABULARY)]
    whole = to_samples([with_branches()], limits(), Hyperparameters())
    assert advantages(found.samples) == advantages(whole.samples)[1:]
    assert rollouts_of(found.samples).tolist() == [0, 0, 1, 2, 2]


@pytest.mark.parametrize("settings", [{"objective": "gspo"}, {"importance_level": "sequence"}])
def test_rollout_whose_branches_exceed_the_token_budget_together_is_dropped_if_a_ratio_needs_them(
    settings: dict[str, Any],
) -> None:
    found = to_samples([with_branches()], limits(), Hyperparameters(token_budget=14, **settings))
    assert [(one.sequence, one.reason) for one in found.rejected] == [
        (index, Reason.OVER_TOKEN_BUDGET) for index in (0, 1, 2)
    ]
    assert [sample.sequence for sample in found.samples] == [3, 4, 5]
    assert found.statistics.rejected == {Reason.OVER_TOKEN_BUDGET: 3}
    assert not to_samples([with_branches()], limits(), Hyperparameters(token_budget=15, **settings)).rejected
    assert not to_samples([with_branches()], limits(), Hyperparameters(token_budget=5)).rejected
