"""Data that cannot be trained on is dropped with a counted reason; the rest of its group is trained on."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.groups import make_group
from tests.unit.trainer.data.bad import group_with, limits

from gristmill import PolicyVersion, TrajectoryGroup
from gristmill.group import NO_LOGPROBS
from gristmill.hyperparameters import Hyperparameters
from gristmill.run import Protocol, RunRecord, RunState
from gristmill_trainer.data.checks import Limits, staleness_bound
from gristmill_trainer.data.samples import Prepared, to_samples
from gristmill_trainer.data.types import Reason

GOOD = make_group("g00000002", version="1.5", rewards=(1.0, 0.0))


def prepare(*groups: TrajectoryGroup, bounds: Limits | None = None, **settings: Any) -> Prepared:
    return to_samples(groups, bounds or limits(), Hyperparameters(**settings))


def gone_whole(bad: TrajectoryGroup, reason: Reason, bounds: Limits | None = None) -> None:
    prepared = prepare(bad, GOOD, bounds=bounds)
    assert [(one.group_id, one.sequence, one.reason) for one in prepared.rejected] == [("g00000001", None, reason)]
    assert prepared.statistics.rejected == {reason: 1}
    assert [sample.group_id for sample in prepared.samples] == ["g00000002"] * 2
    assert prepared.statistics.reward_mean == 0.5
    assert prepared.rejected[0].detail


def gone_alone(bad: TrajectoryGroup, reason: Reason, bounds: Limits | None = None, **settings: Any) -> None:
    """Its first sequence is dropped. The second sequence keeps the advantage that it has together with the first."""
    prepared = prepare(bad, bounds=bounds, **settings)
    assert [(one.group_id, one.sequence, one.reason) for one in prepared.rejected] == [("g00000001", 0, reason)]
    assert prepared.statistics.rejected == {reason: 1}
    (sample,) = prepared.samples
    np.testing.assert_array_equal(sample.tokens, bad.tokens[7:])
    np.testing.assert_allclose(sample.advantages[sample.trained], -0.5 / (np.sqrt(0.5) + 1e-4), rtol=1e-6)
    assert prepared.statistics.sequences == 2


def test_a_group_beyond_the_staleness_bound_is_dropped() -> None:
    old = make_group(version="1.2")
    gone_whole(old, Reason.STALE, limits(max_staleness=2))
    assert not prepare(old, bounds=limits(max_staleness=3)).rejected
    assert not prepare(old, bounds=limits(max_staleness=None)).rejected
    assert prepare(old, GOOD, bounds=limits(max_staleness=3)).statistics.staleness == [3, 0]


def test_group_of_a_later_version_from_a_killed_trainer_is_not_stale() -> None:
    prepared = prepare(make_group(version="1.7"), bounds=limits(policy=PolicyVersion(2, 5), max_staleness=0))
    assert prepared.statistics.staleness == [-2]
    assert not prepared.rejected


def test_atropos_protocol_has_no_staleness_bound() -> None:
    run = RunRecord(run_id="r", state=RunState.OPEN, digest="0", group_size=2, env={}, created_at=0, max_staleness=1)
    assert staleness_bound(run) == 1
    assert staleness_bound(run.model_copy(update={"protocol": Protocol.ATROPOS})) is None


@pytest.mark.parametrize(("token", "logprob"), [(64, -1.0), (3, 0.5)])
def test_a_teacher_of_wrong_values_drops_the_sequence(token: int, logprob: float) -> None:
    ids, logprobs = np.full((12, 2), -1, np.int32), np.zeros((12, 2), np.float32)
    ids[4, 1], logprobs[4, 1] = token, logprob
    gone_alone(group_with(distill_ids=ids.reshape(-1), distill_logprobs=logprobs.reshape(-1)), Reason.DISTILLATION)


@pytest.mark.parametrize(("tokens", "logprobs"), [((3, 3), (-1.0, -1.0)), ((3, 5), (-0.1, -0.2)), ((0, 0), (0.0, 0.0))])
def test_a_teacher_without_a_valid_distribution_drops_the_sequence(
    tokens: tuple[int, int], logprobs: tuple[float, float]
) -> None:
    ids, said = np.full((12, 2), -1, np.int32), np.zeros((12, 2), np.float32)
    ids[4], said[4] = tokens, logprobs
    bad = group_with(distill_ids=ids.reshape(-1), distill_logprobs=said.reshape(-1))
    gone_alone(bad, Reason.DISTILLATION)
    unseen = prepare(bad, distill_coef=0)
    assert not unseen.rejected
    assert all(sample.teacher is None for sample in unseen.samples)


def test_a_teacher_rounded_to_bfloat16_is_accepted() -> None:
    ids, said = np.full((12, 2), -1, np.int32), np.zeros((12, 2), np.float32)
    ids[4], said[4] = (3, 5), np.log([0.501, 0.502])
    good = group_with(distill_ids=ids.reshape(-1), distill_logprobs=said.reshape(-1))
    assert not prepare(good).rejected


@pytest.mark.parametrize("place", [0, 4])
@pytest.mark.parametrize("token", [64, 1 << 30])
def test_a_token_outside_the_vocabulary_drops_its_sequence(place: int, token: int) -> None:
    bad = group_with()
    bad.tokens[place] = token
    gone_alone(bad, Reason.OUTSIDE_VOCABULARY)


def test_a_positive_logprob_of_the_reference_drops_its_sequence() -> None:
    reference = np.full(12, -1, np.float32)
    reference[5] = 0.1
    gone_alone(group_with(ref_logprobs=reference), Reason.REF_LOGPROBS)


def test_an_empty_completion_drops_its_sequence() -> None:
    bad = group_with()
    bad.mask[:7] = False
    gone_alone(bad, Reason.NOTHING_TRAINED)
    bad.mask[0] = True  # no logit predicts the first token
    gone_alone(bad, Reason.NOTHING_TRAINED)


def test_a_completion_beyond_seq_len_drops_its_sequence() -> None:
    bad = group_with()
    bad.mask[:6] = False
    gone_alone(bad, Reason.NOTHING_TRAINED, limits(seq_len=5))
    assert prepare(bad, bounds=limits(seq_len=5)).statistics.seq_len_cuts == 0
    prepared = prepare(group_with(), bounds=limits(seq_len=5))
    assert [len(sample) for sample in prepared.samples] == [5, 5]
    assert [sample.trained_tokens for sample in prepared.samples] == [2, 2]
    assert prepared.statistics.seq_len_cuts == 1


def test_a_sequence_over_the_token_budget_is_dropped() -> None:
    gone_alone(group_with(), Reason.OVER_TOKEN_BUDGET, token_budget=6)
    assert not prepare(group_with(), token_budget=7).rejected
    assert not prepare(group_with(), bounds=limits(seq_len=5), token_budget=5).rejected


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        {"sequences": {"set_advantage_to_zero": True}},
        {"sequences": [{}, "zero"]},
        {"sequences": [{}, {"set_advantage_to_zero": "yes"}]},
        {"group": {"set_advantage_to_zero": 2}},
        {"group": [True]},
        {"group": {3: True}},
        {"sequences": [{"set_advantage_to_zero": True}]},
    ],
)
def test_invalid_overrides_drop_the_group(overrides: object) -> None:
    gone_whole(group_with(overrides=overrides), Reason.OVERRIDES)


def test_step_of_only_bad_groups_has_no_samples_and_no_statistics(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        prepared = prepare(
            *(make_group(f"g{index}", version="1.2") for index in range(3)), bounds=limits(max_staleness=2)
        )
    assert prepared.samples == []
    assert prepared.statistics.rejected == {Reason.STALE: 3}
    assert np.isnan(prepared.statistics.reward_mean)
    (record,) = caplog.records
    assert all(word in record.message for word in (Reason.STALE, "3", "g0", "sampled by 1.2"))


@given(st.permutations(range(6)))
def test_samples_do_not_depend_on_the_order_of_the_lease(order: list[int]) -> None:
    groups = [make_group(f"g{index:08}", version="1.5", seed=index) for index in range(6)]
    groups[3] = group_with("g00000003", overrides=[])
    settings = Hyperparameters(advantage_scale="batch")
    wanted = to_samples(groups, limits(), settings)
    found = to_samples([groups[index] for index in order], limits(), settings)
    assert found.statistics == wanted.statistics
    assert found.rejected == wanted.rejected
    for ours, theirs in zip(found.samples, wanted.samples, strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        assert ours.advantages.tobytes() == theirs.advantages.tobytes()


def test_a_group_without_recorded_logprobs_is_trained_on() -> None:
    prepared = prepare(group_with(logprobs=np.zeros(12, np.float32), meta={NO_LOGPROBS: True}))
    assert not prepared.rejected
    for sample in prepared.samples:
        assert np.isnan(sample.rollout_logprobs[sample.trained]).all()
        assert not sample.rollout_logprobs[~sample.trained].any()
