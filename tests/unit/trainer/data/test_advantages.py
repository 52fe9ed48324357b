"""Advantages compared with plain float64 arithmetic, length penalty and filter of long completions, and advantages from
the environment."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.groups import make_group
from tests.unit.trainer.data.bad import group_with, limits

from gristmill import SamplingParams
from gristmill.hyperparameters import Hyperparameters
from gristmill_trainer.data.advantages import Scale, advantages, length_penalty
from gristmill_trainer.data.samples import to_samples

REWARDS = st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=8)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@given(groups=st.lists(REWARDS, min_size=1, max_size=5))
def test_advantages_match_plain_float64_arithmetic(scale: Scale, groups: list[list[float]]) -> None:
    found = advantages([np.array(group) for group in groups], scale)
    everything = [reward for group in groups for reward in group]
    for group, ours in zip(groups, found, strict=True):
        mean = math.fsum(group) / len(group)
        divisor = {
            "group": statistics.stdev(group) + 1e-4,
            "batch": statistics.stdev(everything) + 1e-4,
            "none": 1.0,
        }[scale]
        wanted = [(reward - mean) / divisor for reward in group]
        np.testing.assert_allclose(ours, wanted, rtol=1e-6, atol=1e-7)
        assert ours.dtype == np.float32


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@given(reward=st.floats(-10, 10), size=st.integers(2, 20))
def test_advantages_of_equal_rewards_are_zero(scale: Scale, reward: float, size: int) -> None:
    found, _ = advantages([np.full(size, reward), np.array([1.0, 2.0])], scale)
    np.testing.assert_array_equal(found, np.zeros(size))


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantage_of_a_single_sequence_group_equals_its_reward(scale: Scale) -> None:
    single, _ = advantages([np.array([0.25]), np.array([1.0, 0.0])], scale)
    np.testing.assert_array_equal(single, [0.25])


def test_advantages_of_no_groups_are_empty() -> None:
    assert advantages([], "batch") == []


def test_length_penalty_matches_dapo() -> None:
    """Eq. 13: L_max 20480, L_cache 4096."""
    lengths = np.array([0, 16384, 16385, 18432, 20479, 20480, 30000])
    found = length_penalty(lengths, 20480, 4096, 1.0)
    np.testing.assert_allclose(found, [0, 0, -1 / 4096, -0.5, -4095 / 4096, -1, -1], rtol=1e-12)
    np.testing.assert_allclose(length_penalty(lengths, 20480, 4096, 0.5), found / 2)


def test_length_penalty_changes_advantages_and_not_reported_rewards() -> None:
    group = replace(
        make_group(lengths=((3, 4), (3, 6), (3, 8)), rewards=(1, 1, 1), version="1.5"),
        sampling=SamplingParams(temperature=0.7, max_tokens=8),
    )
    settings = Hyperparameters(advantage_scale="none", overlong_buffer=4, overlong_penalty=0.6)
    prepared = to_samples([group], limits(), settings)
    found = [float(sample.advantages[-1]) for sample in prepared.samples]
    np.testing.assert_allclose(found, [0.3, 0.0, -0.3], atol=1e-7)
    assert prepared.statistics.reward_mean == 1.0
    assert prepared.statistics.overlong_punished == 2
    assert {sample.temperature for sample in prepared.samples} == {0.7}


def test_length_penalty_of_several_turns_uses_the_longest_reply() -> None:
    """max_tokens applies to each reply."""
    group = make_group(lengths=((3, 9), (3, 9)), rewards=(1, 1), version="1.5")
    mask = group.mask.copy()
    mask[[7, 8]] = False  # replies of 4 and 3 tokens, and one of 9
    group = replace(group, mask=mask, sampling=SamplingParams(temperature=1.0, max_tokens=9))
    settings = Hyperparameters(advantage_scale="none", overlong_buffer=4, overlong_penalty=0.8)
    prepared = to_samples([group], limits(), settings)
    assert prepared.statistics.overlong_punished == 1
    np.testing.assert_allclose([float(sample.advantages[-1]) for sample in prepared.samples], [0.4, -0.4], atol=1e-7)


def test_overlong_filter_keeps_the_sequence_and_trains_no_tokens() -> None:
    group = group_with(finish_reasons=["length", "stop"])
    prepared = to_samples([group], limits(), Hyperparameters(overlong="filter"))
    cut, whole = prepared.samples
    assert (cut.trained_tokens, whole.trained_tokens) == (0, 2)
    assert not cut.rollout_logprobs.any()
    assert prepared.statistics.overlong_filtered == 1
    assert prepared.statistics.cut_off_share == 0.5
    # The baseline included it.
    np.testing.assert_allclose(whole.advantages, -0.5 / (np.sqrt(0.5) + 1e-4), rtol=1e-6)
    kept = to_samples([group], limits(), Hyperparameters())
    assert [sample.trained_tokens for sample in kept.samples] == [4, 2]
    assert kept.statistics.overlong_filtered == 0


def test_advantages_of_the_environment_are_used_unchanged() -> None:
    sent = np.linspace(-3, 3, 12, dtype=np.float32)
    settings = Hyperparameters(overlong_buffer=64)
    prepared = to_samples([group_with(advantages=sent)], limits(), settings)
    np.testing.assert_array_equal(np.concatenate([sample.advantages for sample in prepared.samples]), sent)
    assert prepared.statistics.overlong_punished == 0


def test_step_statistics_describe_the_groups_of_the_step() -> None:
    groups = [
        replace(make_group("g00000001", version="1.5", rewards=(1.0, 0.0)), meta={"source": "sums"}),
        replace(
            make_group("g00000002", version="1.4", rewards=(0.5, 0.5)),
            meta={"source": 1},  # Another program's, which the trainer does not read.
            reward_parts={"length": [0.5, None], "exact": [1.0, 0.0]},
        ),
    ]
    found = to_samples(groups, limits(), Hyperparameters()).statistics
    assert (found.groups, found.sequences) == (2, 4)
    assert found.reward_mean == 0.5
    assert found.reward_std == pytest.approx(np.sqrt(0.125))
    assert found.reward_parts == pytest.approx({"length": 0.5, "exact": 0.5})
    assert found.source_rewards == {"sums": 0.5}
    assert found.staleness == [0, 1]
    assert found.completion_tokens_mean == 3
    assert found.zero_advantage_share == 0.5
    assert found.rejected == {}


def test_samples_slice_reference_logprobs_and_teachers_with_their_sequence() -> None:
    reference = -np.arange(1, 13, dtype=np.float32)
    ids, logprobs = np.arange(24, dtype=np.int32), -np.arange(24, dtype=np.float32)
    group = group_with(ref_logprobs=reference, distill_ids=ids, distill_logprobs=logprobs)
    first, second = to_samples([group], limits(seq_len=6), Hyperparameters()).samples
    assert first.ref_logprobs is not None
    assert second.ref_logprobs is not None
    np.testing.assert_array_equal(first.ref_logprobs, reference[:6])
    np.testing.assert_array_equal(second.ref_logprobs, reference[7:])
    assert second.teacher is not None
    np.testing.assert_array_equal(second.teacher.ids, ids[14:].reshape(-1, 2))
    np.testing.assert_array_equal(second.teacher.logprobs, logprobs[14:].reshape(-1, 2))
