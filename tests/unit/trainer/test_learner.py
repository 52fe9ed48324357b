"""What an optimizer step does: the same however the batch is cut up, whole or not at all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from gristmill_trainer.data.sample import Sample, Teacher
from gristmill_trainer.errors import AbandonedError
from gristmill_trainer.learner import Learner
from gristmill_trainer.observed import measure
from gristmill_trainer.optimizer import build_optimizer, build_schedule, learning_rate_factor
from gristmill_trainer.policy import Lora, ModelSource, Policy
from gristmill_trainer.settings import TrainerSettings

Build = Callable[..., Learner]


@pytest.fixture
def build(model_dir: Path) -> Build:
    """A learner on the small model, with these settings."""

    def learner(*, reference: Policy | None = None, plain: bool = False, **settings: Any) -> Learner:
        """`plain`: plain steps along the gradient, which hide nothing of it. Adam's hide its size."""
        defaults: dict[str, Any] = {"device": "cpu", "batch_size": 8, "learning_rate": 1e-3}
        chosen = TrainerSettings(**(defaults | settings))
        source = ModelSource(str(model_dir), str(model_dir), None, 512)
        lora = Lora(chosen.lora_rank, chosen.lora_alpha) if chosen.lora_rank else None
        policy = Policy(source, "cpu", packing=chosen.packing, checkpointing=chosen.gradient_checkpointing, lora=lora)
        parameters = policy.trained_parameters()
        optimizer = torch.optim.SGD(parameters, lr=1.0) if plain else build_optimizer(chosen, parameters)
        schedule = build_schedule(optimizer, chosen, chosen.training_steps)
        return Learner(policy, optimizer, chosen, schedule=schedule, max_completion_length=16, reference=reference)

    return learner


def make_samples(count: int = 8, seed: int = 0) -> list[Sample]:
    """Ragged, in groups of two, with rollout log-probabilities near those of a random model."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(count):
        prompt, completion = int(rng.integers(2, 6)), int(rng.integers(1, 12))
        trained = np.arange(prompt + completion) >= prompt
        found.append(
            Sample(
                group_id=f"g{number // 2}",
                tokens=rng.integers(0, 64, len(trained), dtype=np.int32),
                trained=trained,
                rollout_logprobs=np.where(trained, -4.2 + 0.3 * rng.normal(size=len(trained)), 0).astype(np.float32),
                advantages=np.where(trained, rng.normal(), 0).astype(np.float32),
                temperature=0.8,
            )
        )
    return found


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.policy.model.state_dict().items()}


def moments(learner: Learner) -> list[torch.Tensor]:
    """The optimizer's whole state."""
    return [value.clone() for state in learner.optimizer.state.values() for value in state.values()]


def assert_same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(other[name], tensor) for name, tensor in one.items())


def farthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((other[name] - tensor).abs().max()) for name, tensor in one.items())


def teach(learner: Learner, samples: Sequence[Sample], steps: int = 2) -> list[float]:
    return [learner.step(samples, step).loss for step in range(1, steps + 1)]


CUTS: dict[str, dict[str, Any]] = {
    "padded": {"packing": False},
    "token budget": {"token_budget": 24},
    "token budget, padded": {"token_budget": 24, "packing": False},
    "accumulated": {"batch_size": 2, "gradient_accumulation_steps": 4},
    "one by one": {"batch_size": 1, "gradient_accumulation_steps": 8},
    "checkpointed": {"gradient_checkpointing": True},
}


@pytest.mark.parametrize("objective", ["dapo", "grpo", "dr_grpo", "cispo", "gspo"])
@pytest.mark.parametrize("cut", CUTS)
def test_how_a_batch_is_cut_up_changes_nothing(build: Build, objective: str, cut: str) -> None:
    settings = {"objective": objective, "entropy_coef": 0.01, "plain": True, "max_grad_norm": 1e6}
    whole, pieces = build(**settings), build(**settings, **CUTS[cut])
    before = weights(whole)
    samples = make_samples()
    assert teach(pieces, samples) == pytest.approx(teach(whole, samples), abs=1e-6)
    assert farthest(weights(pieces), weights(whole)) <= 1e-6
    assert farthest(before, weights(whole)) > 1e-4


@pytest.mark.parametrize("cut", ["padded", "token budget"])
def test_bnpo_looks_at_local_batches_and_not_at_how_they_are_packed(build: Build, cut: str) -> None:
    settings = {"objective": "bnpo", "plain": True, "max_grad_norm": 1e6}
    plain, other = build(**settings, batch_size=2), build(**settings, batch_size=2, **CUTS[cut])
    larger = build(**settings, batch_size=8)
    samples = make_samples()
    losses = teach(plain, samples)
    assert teach(other, samples) == pytest.approx(losses, abs=1e-6)
    assert farthest(weights(other), weights(plain)) <= 1e-6
    assert abs(teach(larger, samples)[0] - losses[0]) > 1e-4


def test_the_old_policy_is_the_one_before_the_first_update(build: Build) -> None:
    learner, samples = build(num_epochs=2, learning_rate=1e-2), make_samples()
    tokens = sum(sample.trained_tokens for sample in samples)
    before = np.concatenate([row[one.trained] for row, one in zip(learner.logprobs(samples), samples, strict=True)])
    seen = learner.step(samples, 1).seen
    ratio = np.exp(seen.logprobs - seen.old_logprobs)
    assert len(ratio) == 2 * tokens
    assert ratio[:tokens] == pytest.approx(1.0, abs=1e-5)
    assert np.abs(ratio[tokens:] - 1.0).max() > 0.01
    assert seen.old_logprobs[:tokens] == pytest.approx(before, abs=1e-6)
    assert seen.old_logprobs[tokens:] == pytest.approx(before, abs=1e-6)


def test_the_second_minibatch_meets_a_policy_that_has_moved(build: Build) -> None:
    learner, samples = build(minibatches=4, learning_rate=1e-2), make_samples()
    result = learner.step(samples, 1)
    assert len(result.seen.logprobs) == sum(sample.trained_tokens for sample in samples), "each token once"
    assert result.tokens == sum(len(sample) for sample in samples)
    ratio = np.exp(result.seen.logprobs - result.seen.old_logprobs)
    assert np.abs(ratio - 1.0).max() > 0.01
    assert np.abs(ratio - 1.0).min() <= 1e-5, "the first minibatch meets the old policy"


def test_one_update_needs_no_old_policy(build: Build) -> None:
    seen = build().step(make_samples(), 1).seen
    assert np.array_equal(seen.logprobs, seen.old_logprobs)


def test_the_old_policy_stands_in_for_a_rollout_policy_that_nobody_recorded(build: Build) -> None:
    samples = make_samples()
    unknown = [
        replace(one, rollout_logprobs=np.where(one.trained, np.nan, 0).astype(np.float32), rollout_known=False)
        for one in samples
    ]
    learner, corrected = build(importance_cap=1.5), build(importance_correction="none")
    result = learner.step(unknown, 1)
    assert result.skipped is None
    assert np.array_equal(result.seen.rollout_logprobs, result.seen.old_logprobs)
    assert result.loss == pytest.approx(corrected.step(samples, 1).loss, abs=1e-6)
    assert farthest(weights(learner), weights(corrected)) <= 1e-6


def test_the_rollout_policy_counts_where_it_is_known(build: Build) -> None:
    samples = make_samples()
    assert abs(build().step(samples, 1).loss - build(importance_correction="none").step(samples, 1).loss) > 1e-4


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_leaves_everything_bit_for_bit(build: Build, bad: float) -> None:
    learner, samples = build(batch_size=2), make_samples()
    learner.step(samples, 1)
    before, state = weights(learner), moments(learner)
    advantages = samples[5].advantages.copy()
    advantages[-1] = bad
    broken = [*samples[:5], replace(samples[5], advantages=advantages), *samples[6:]]
    result = learner.step(broken, 2)
    assert result.skipped is not None
    assert "loss" in result.skipped
    assert_same_bits(weights(learner), before)
    assert all(torch.equal(one, other) for one, other in zip(moments(learner), state, strict=True))
    after = learner.step(samples, 3)
    assert after.skipped is None, "nothing of the bad gradient is left"
    assert math.isfinite(after.grad_norm)
    assert farthest(weights(learner), before) > 0


def test_one_update_of_several_is_left_out_and_the_others_count(build: Build) -> None:
    learner, samples = build(minibatches=4), make_samples()
    bad = replace(samples[5], advantages=samples[5].advantages * np.float32(np.nan))
    before = weights(learner)
    result = learner.step([*samples[:5], bad, *samples[6:]], 1)
    assert (result.skipped, result.left_out) == (None, 1)
    assert math.isfinite(result.loss)
    assert math.isfinite(result.grad_norm)
    assert farthest(weights(learner), before) > 0
    none = learner.step([replace(one, advantages=bad.advantages[-1:].repeat(len(one))) for one in samples], 2)
    assert none.left_out == 4
    assert none.skipped is not None


def test_without_a_trained_token_nothing_moves_but_the_schedule(build: Build) -> None:
    learner, samples = build(lr_schedule="linear", training_steps=4), make_samples()
    learner.step(samples, 1)
    before, state = weights(learner), moments(learner)
    for left in ([replace(one, trained=np.zeros_like(one.trained)) for one in samples], []):
        result = learner.step(left, 2)
        assert result.skipped is not None
        assert "nothing is left" in result.skipped
        assert math.isnan(result.loss)
    assert_same_bits(weights(learner), before)
    assert all(torch.equal(one, other) for one, other in zip(moments(learner), state, strict=True))
    assert learner.learning_rate == pytest.approx(1e-3 * learning_rate_factor(3, "linear", 0, 4))


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_a_policy_equal_to_its_teacher_stays_where_places_have_fewer_tokens(build: Build, direction: str) -> None:
    """Of a teacher of two tokens, some places bring one, and others none: what is absent must not pull."""
    learner = build(distill_divergence=direction, plain=True, max_grad_norm=1e6)
    silent = [replace(one, advantages=np.zeros_like(one.advantages)) for one in make_samples()]
    ids = [np.stack([one.tokens, (one.tokens + 1) % 64], axis=1).astype(np.int32) for one in silent]
    spoken = []
    for column in (0, 1):
        # The policy's own words: its log-probability of each token where it would stand.
        asked = [
            replace(one, tokens=np.where(one.trained, own[:, column], one.tokens).astype(np.int32))
            for one, own in zip(silent, ids, strict=True)
        ]
        spoken.append([_first_trained(learner, one, other) for one, other in zip(silent, asked, strict=True)])
    taught = []
    for number, (one, own) in enumerate(zip(silent, ids, strict=True)):
        first = int(np.flatnonzero(one.trained)[0])
        known, said = np.full_like(own, -1), np.zeros(own.shape, np.float32)
        for column in range(1 + number % 2):
            known[first, column], said[first, column] = own[first, column], spoken[column][number]
        taught.append(replace(one, teacher=Teacher(known, said)))
    result = learner.step(taught, 1)
    assert result.loss == pytest.approx(0, abs=1e-6)
    assert result.grad_norm <= 1e-4
    # And one that differs is learned from.
    apart = [replace(one, teacher=Teacher(one.teacher.ids, one.teacher.logprobs - 1)) for one in taught if one.teacher]
    assert build(distill_divergence=direction).step(apart, 1).loss > 1e-3


def _first_trained(learner: Learner, one: Sample, other: Sample) -> float:
    """The policy's log-probability of `other`'s first trained token, after `one`'s prompt."""
    first = int(np.flatnonzero(one.trained)[0])
    return float(learner.logprobs([other])[0][first])


def test_what_is_told_of_clips_is_what_the_objective_clips(build: Build) -> None:
    """Ratios that moved far, by old log-probabilities that are far away: the share of tokens without a gradient."""
    samples = make_samples()
    now = build().logprobs(samples)
    moved = [
        replace(one, old_logprobs=np.where(one.trained, row - 2.0, 0).astype(np.float32))
        for one, row in zip(samples, now, strict=True)
    ]
    positive = np.concatenate([one.advantages[one.trained] > 0 for one in samples])
    for objective, share in (("dapo", positive.mean()), ("cispo", 1.0), ("gspo", positive.mean())):
        found = measure(build(objective=objective).step(moved, 1).seen)
        assert found.clip_high_share == pytest.approx(share), objective
        assert found.clip_low_share == 0.0
        assert found.ratio is not None
        assert found.ratio["p50"] == pytest.approx(math.exp(2.0), rel=1e-3)
    assert measure(build(objective="cispo", clip_epsilon_high=8.0).step(moved, 1).seen).clip_high_share == 0.0


def test_a_sequences_weight_is_told_where_a_sequences_weight_is_used(build: Build) -> None:
    samples = make_samples()
    now = build().logprobs(samples)
    known = [
        replace(one, rollout_logprobs=np.where(one.trained, row - 0.1, 0).astype(np.float32))
        for one, row in zip(samples, now, strict=True)
    ]
    token = measure(build(importance_cap=1.5).step(known, 1).seen)
    sequence = measure(build(importance_cap=1.5, importance_level="sequence").step(known, 1).seen)
    lengths = np.repeat([one.trained_tokens for one in samples], [one.trained_tokens for one in samples])
    assert token.importance is not None
    assert sequence.importance is not None
    assert token.importance["max"] == pytest.approx(math.exp(0.1), rel=1e-3)
    assert token.importance_capped_share == 0.0
    assert sequence.importance["max"] == pytest.approx(math.exp(0.1 * lengths.max()), rel=1e-3)
    assert sequence.importance_capped_share == pytest.approx((np.exp(0.1 * lengths) > 1.5).mean())


def test_a_step_that_is_given_up_leaves_the_weights(build: Build) -> None:
    learner, untouched, samples = build(batch_size=2), build(batch_size=2), make_samples()
    answers: Iterator[bool] = iter([True, True, False])
    with pytest.raises(AbandonedError) as abandoned:
        learner.step(samples, 1, lambda: next(answers))
    assert abandoned.value.untouched
    assert_same_bits(weights(learner), weights(untouched))
    assert learner.step(samples, 1).loss == untouched.step(samples, 1).loss
    assert_same_bits(weights(learner), weights(untouched))


def test_a_step_that_is_given_up_after_an_update_says_so(build: Build) -> None:
    learner, samples = build(minibatches=2), make_samples()
    before = weights(learner)
    answers: Iterator[bool] = iter([True, False])
    with pytest.raises(AbandonedError) as abandoned:
        learner.step(samples, 1, lambda: next(answers))
    assert not abandoned.value.untouched
    assert farthest(weights(learner), before) > 0


def test_a_step_given_up_after_an_update_that_was_left_out_is_untouched(build: Build) -> None:
    learner = build(num_epochs=2)
    broken = [replace(sample, advantages=sample.advantages * np.float32(np.nan)) for sample in make_samples()]
    before = weights(learner)
    answers: Iterator[bool] = iter([True, False])
    with pytest.raises(AbandonedError) as abandoned:
        learner.step(broken, 1, lambda: next(answers))
    assert abandoned.value.untouched
    assert_same_bits(weights(learner), before)


def with_reference(learner: Learner, samples: Sequence[Sample], shift: float = 0.0) -> list[Sample]:
    found = learner.logprobs(samples)
    return [
        replace(one, ref_logprobs=np.where(one.trained, row + shift, 0).astype(np.float32))
        for one, row in zip(samples, found, strict=True)
    ]


def test_a_groups_own_reference_is_used_and_no_model_is_needed(build: Build) -> None:
    samples = make_samples()
    near, far = build(kl_beta=1.0), build(kl_beta=1.0)
    assert near.step(with_reference(near, samples), 1).loss == pytest.approx(build().step(samples, 1).loss, abs=1e-6)
    # k3 of a difference of 0.5 at every token.
    penalty = math.exp(0.5) - 1 - 0.5
    loss = far.step(with_reference(far, samples, shift=0.5), 1).loss
    assert loss == pytest.approx(build().step(samples, 1).loss + penalty, abs=1e-5)


def test_the_reference_model_speaks_where_groups_do_not(build: Build) -> None:
    samples, moved = make_samples(), build(learning_rate=1e-2)
    teach(moved, samples, steps=3)
    own, model = build(kl_beta=1.0), build(kl_beta=1.0, reference=moved.policy)
    spoken = moved.logprobs(samples)
    brought = [replace(one, ref_logprobs=row) for one, row in zip(samples, spoken, strict=True)]
    wanted = own.step(brought, 1)
    # One group brings its own, and it stands.
    found = model.step([*brought[:2], *samples[2:]], 1)
    assert found.loss == pytest.approx(wanted.loss, abs=1e-6)
    assert found.seen.ref_logprobs == pytest.approx(wanted.seen.ref_logprobs, abs=1e-6)
    assert wanted.loss > build().step(samples, 1).loss + 1e-3


def test_with_lora_the_reference_is_the_policy_without_its_adapters(build: Build) -> None:
    samples = make_samples()
    model = build().policy
    torch.manual_seed(0)
    without = build(lora_rank=2, kl_beta=1.0)
    torch.manual_seed(0)
    beside = build(lora_rank=2, kl_beta=1.0, reference=model)
    for step in range(1, 4):
        free, loaded = without.step(samples, step), beside.step(samples, step)
        assert free.loss == pytest.approx(loaded.loss, abs=1e-6)
        assert free.grad_norm == pytest.approx(loaded.grad_norm, rel=1e-5)
    assert measure(free.seen).kl_ref == pytest.approx(measure(loaded.seen).kl_ref, abs=1e-6)
    assert abs(free.seen.logprobs - free.seen.ref_logprobs).max() > 1e-3, "the adapters have not moved"


def test_references_that_only_some_groups_bring_are_no_matter_without_a_penalty(build: Build) -> None:
    learner, samples = build(batch_size=2), make_samples()
    seen = learner.step([*with_reference(learner, samples[:2]), *samples[2:]], 1).seen
    assert np.isnan(seen.ref_logprobs).any()
    assert measure(seen).kl_ref is None


def test_the_schedule_goes_on_once_a_step(build: Build) -> None:
    learner = build(num_epochs=2, minibatches=2, warmup_steps=2, lr_schedule="linear", training_steps=6)
    samples, rates = make_samples(), []
    for step in range(1, 7):
        rates.append(learner.learning_rate)
        learner.step(samples, step)
    assert rates == pytest.approx([1e-3 * learning_rate_factor(done, "linear", 2, 6) for done in range(6)])


def test_a_sequence_without_trained_tokens_counts_and_gives_nothing(build: Build) -> None:
    samples = make_samples()
    filtered = [*samples[:7], replace(samples[7], trained=np.zeros_like(samples[7].trained))]
    one, other = build(objective="grpo"), build(objective="grpo", batch_size=1)
    losses = teach(one, filtered)
    assert teach(other, filtered) == pytest.approx(losses, abs=1e-6)
    shorter = build(objective="grpo").step(samples[:7], 1).loss
    assert losses[0] == pytest.approx(shorter * 7 / 8, abs=1e-6)
    assert one.logprobs(filtered)[7].tolist() == [0.0] * len(samples[7])


def test_scores_are_the_models_own(build: Build, model_dir: Path) -> None:
    learner, samples = build(token_budget=24), make_samples()
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir)
    for sample, found in zip(samples, learner.logprobs(samples), strict=True):
        tokens = torch.from_numpy(sample.tokens.astype(np.int64))
        with torch.no_grad():
            logits = model(input_ids=tokens[None]).logits[0, :-1].double() / 0.8
        wanted = logits.log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1).numpy()
        assert found[1:][sample.trained[1:]] == pytest.approx(wanted[sample.trained[1:]], abs=1e-5)
        assert not found[~sample.trained].any()
