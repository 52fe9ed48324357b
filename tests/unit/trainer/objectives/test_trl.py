"""Loss and every gradient compared with TRL's `_compute_loss`, over all variants that both implement.

Bounds, in float32: |loss - TRL's| <= 1e-6. For every parameter, the norm of the difference of its gradient is at most
1e-5 of the norm of the whole gradient. Some batches amplify rounding. A loss of 10 has no digits finer than 1e-6. A
gradient that almost cancels, as for a KL term near its minimum, consists mostly of rounding.

If a difference exceeds a bound, the test computes in float64 how much log-probabilities that are off by 2e-6 change
that batch. The difference must not be larger than that change. The worst of a hundred log-probabilities are off by 2e-6
(`test_float32_log_probabilities_differ_from_float64_within_the_assumed_error`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.support.grids import part_of_grid
from tests.support.trl_oracle import (
    MAX_COMPLETION_LENGTH,
    VOCABULARY,
    Gradient,
    PaddedBatch,
    Variant,
    gradient,
    trl_loss,
)
from transformers import Qwen2ForCausalLM

from gristmill.hyperparameters import Hyperparameters
from gristmill_trainer.objectives import Objective, TrainedTokens, token_weights
from gristmill_trainer.objectives.losses import (
    Clip,
    PolicyLoss,
    TokenLosses,
    clipped,
    sequence_log_ratio,
    weighted_likelihood,
)

LOSS_TYPES = ["grpo", "dapo", "bnpo", "dr_grpo", "cispo"]
LEVELS = ["token", "sequence"]
CORRECTIONS = ["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@st.composite
def variants(draw: st.DrawFn, loss_type: str, level: str, correction: str) -> Variant:
    micro_batches = draw(st.sampled_from([1, 1, 2, 3]))
    highs: list[float | None] = [0.9, 1.2, 5.0] if loss_type == "cispo" else [None, 0.28, 0.05]
    return Variant(
        loss_type=loss_type,  # type: ignore[arg-type]
        level=level,  # type: ignore[arg-type]
        correction=correction,  # type: ignore[arg-type]
        cap=draw(st.sampled_from([0.8, 2.0])),
        floor=draw(st.sampled_from([None, 0.5])),
        epsilon=draw(st.sampled_from([0.2, 3e-4])),
        epsilon_high=draw(st.sampled_from(highs)),
        beta=draw(st.sampled_from([0.0, 0.04])),
        kl_bias_correction=draw(st.booleans()),
        # TRL takes the mean of the entropy over a micro-batch, we take it over the update. With one micro-batch both
        # agree.
        entropy_coef=draw(st.sampled_from([0.0, 0.01])) if micro_batches == 1 else 0.0,
        temperature=draw(st.sampled_from([1.0, 0.7])),
        # With a correction TRL always computes the old policy beforehand. Here it keeps the weights, which multiply up
        # the roundings of a whole sequence, the same on both sides.
        old_given=draw(st.booleans()) if correction == "none" else True,
        micro_batches=micro_batches,
    )


def make_batch(rng: np.random.Generator, sequences: int, prompt: int, completion: int, model_dir: Path) -> PaddedBatch:
    """Sequences of different lengths, with holes. The policies are near the model's own policy, so that some ratios are
    clipped and some are not."""
    shape = (sequences, completion)
    lengths = rng.integers(0, completion + 1, sequences)
    prompt_lengths = rng.integers(1, prompt + 1, sequences)
    ints = {
        "prompts": rng.integers(0, VOCABULARY, (sequences, prompt)),
        "prompt_mask": np.arange(prompt) >= prompt - prompt_lengths[:, None],
        "completions": rng.integers(0, VOCABULARY, shape),
        "completion_mask": np.arange(completion) < lengths[:, None],
        "tool_mask": rng.random(shape) < 0.8,
    }
    tensors = {name: torch.from_numpy(array.astype(np.int64)) for name, array in ints.items()}
    near = torch.from_numpy(rng.normal(0, 0.3, (3, *shape)).astype(np.float32))
    advantages = torch.from_numpy(rng.normal(0, 1, sequences).astype(np.float32))
    blank = PaddedBatch(**tensors, advantages=advantages, old=near[0], rollout=near[1], ref=near[2])
    with torch.no_grad():
        own = _forward(_model(model_dir, torch.float32), blank, 1.0)[0]
    return PaddedBatch(**tensors, advantages=advantages, old=own + near[0], rollout=own + near[1], ref=own + near[2])


@cache
def _model(model_dir: Path, dtype: torch.dtype) -> Qwen2ForCausalLM:
    model: Qwen2ForCausalLM = Qwen2ForCausalLM.from_pretrained(model_dir, dtype=dtype)
    model.train()
    return model


def _forward(model: Qwen2ForCausalLM, batch: PaddedBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns [B, T] log-probabilities and entropies in the model's dtype, by a softmax over the whole vocabulary."""
    tokens = torch.cat([batch.prompts, batch.completions], dim=1)
    attention = torch.cat([batch.prompt_mask, batch.completion_mask], dim=1)
    first = batch.prompts.shape[1] - 1
    logits = model(input_ids=tokens, attention_mask=attention).logits[:, first:-1] / temperature
    everything = logits.log_softmax(dim=-1)
    chosen = everything.gather(2, batch.completions[..., None]).squeeze(2)
    return chosen, -(everything.exp() * everything).sum(dim=-1)


def our_loss(
    variant: Variant, batch: PaddedBatch, model_dir: Path, nudges: torch.Tensor | float = 0.0
) -> tuple[float, Gradient]:
    """In the batch's dtype; `nudges` are added to the policy's log-probabilities."""
    dtype = batch.advantages.dtype
    model = _model(model_dir, dtype)
    model.zero_grad()
    logprobs, entropy = _forward(model, batch, variant.temperature)
    logprobs = logprobs + nudges
    old = batch.old if variant.old_given else logprobs.detach()
    level, how = variant.correction.split("_") if variant.correction != "none" else ("token", "none")
    name = "gspo" if (variant.level, variant.loss_type) == ("sequence", "grpo") else variant.loss_type
    chosen = Hyperparameters(
        objective=name,
        clip_epsilon=variant.epsilon,
        clip_epsilon_high=variant.epsilon if variant.epsilon_high is None else variant.epsilon_high,
        importance_correction=how,  # type: ignore[arg-type]
        importance_level=level,  # type: ignore[arg-type]
        importance_cap=variant.cap,
        importance_floor=variant.floor or 0.0,
        kl_beta=variant.beta,
        kl_bias_correction=variant.kl_bias_correction,
        entropy_coef=variant.entropy_coef,
    )
    objective = Objective.of(chosen)
    # TRL combines any aggregation with a ratio of the sequence. We offer only gspo, and can compute all of them.
    if variant.level == "sequence":
        objective = replace(objective, policy_loss=_of_sequences(variant))
    trained = batch.mask.sum(dim=1).numpy()
    weights = token_weights(name, trained, len(trained) // variant.micro_batches, MAX_COMPLETION_LENGTH)
    sequence, column = batch.mask.nonzero(as_tuple=True)
    tokens = TrainedTokens(
        logprobs=logprobs[sequence, column],
        old_logprobs=old[sequence, column],
        rollout_logprobs=batch.rollout[sequence, column],
        advantages=batch.advantages[sequence],
        weights=torch.from_numpy(weights).to(dtype)[sequence],
        sequence=sequence,
        sequences=len(trained),
        entropy=entropy[sequence, column] if objective.wants_entropy_gradient else None,
        entropy_weight=1 / max(int(trained.sum()), 1),
        ref_logprobs=batch.ref[sequence, column] if objective.wants_reference else None,
    )
    loss, _ = objective.loss(tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item(), gradient(model)


def _of_sequences(variant: Variant) -> PolicyLoss:
    """Returns the policy loss with the ratio of each sequence."""
    surrogate = weighted_likelihood if variant.loss_type == "cispo" else clipped

    def losses(tokens: TrainedTokens, kept: torch.Tensor, clip: Clip) -> TokenLosses:
        return surrogate(sequence_log_ratio(tokens), tokens, kept, clip)

    return losses


def _compare(variant: Variant, batch: PaddedBatch, model_dir: Path) -> None:
    loss, found = our_loss(variant, batch, model_dir)
    expected_loss, expected = trl_loss(variant, batch, model_dir)
    apart = abs(loss - expected_loss)
    assert apart <= 1e-6 or apart <= _rounding(variant, batch, model_dir).loss
    assert found.keys() == expected.keys()
    norm = _norm(expected)
    for name in expected:
        apart = (found[name] - expected[name]).norm().item()
        assert apart <= 1e-5 * norm or apart <= _rounding(variant, batch, model_dir).gradient, name


class _Rounding(NamedTuple):
    loss: float
    gradient: float


def _rounding(variant: Variant, batch: PaddedBatch, model_dir: Path) -> _Rounding:
    """Returns how far loss and gradient move, in float64, when each log-probability goes up or down by 2e-6: the
    largest move of some random choices."""
    exact = _in_float64(batch)
    loss, here = our_loss(variant, exact, model_dir)
    here = {name: value.clone() for name, value in here.items()}
    rng = np.random.default_rng(0)
    losses, gradients = [], []
    for _ in range(8):
        nudges = torch.from_numpy(rng.choice([-2e-6, 2e-6], tuple(batch.completions.shape)))
        nudged, there = our_loss(variant, exact, model_dir, nudges)
        losses.append(abs(nudged - loss))
        gradients.append(_norm({name: there[name] - here[name] for name in here}))
    return _Rounding(max(losses), max(gradients))


def _in_float64(batch: PaddedBatch) -> PaddedBatch:
    floats = {name: value.double() for name, value in vars(batch).items() if value.is_floating_point()}
    return replace(batch, **floats)


def _norm(of: Gradient) -> float:
    return float(torch.stack([value.norm() for value in of.values()]).norm())


def _check(data: st.DataObject, loss_type: str, level: str, correction: str, model_dir: Path) -> None:
    variant = data.draw(variants(loss_type, level, correction))
    # Hypothesis tries the minimal example first, so this example must test something.
    sequences = variant.micro_batches * data.draw(st.integers(1, 3).map(lambda n: 4 - n))
    prompt, completion = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9).map(lambda n: 10 - n))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    _compare(variant, make_batch(rng, sequences, prompt, completion, model_dir), model_dir)


def test_float32_log_probabilities_differ_from_float64_within_the_assumed_error(oracle_model: Path) -> None:
    """The error of float32 compared with float64, which `_rounding` assumes."""
    errors = []
    for seed in range(60):
        batch = make_batch(np.random.default_rng(seed), 4, 5, 9, oracle_model)
        with torch.no_grad():
            found, _ = _forward(_model(oracle_model, torch.float32), batch, 0.7)
            exact, _ = _forward(_model(oracle_model, torch.float64), _in_float64(batch), 0.7)
        errors.append((found - exact).abs()[batch.mask.bool()])
    worst = float(torch.cat(errors).quantile(0.99))
    assert 1e-6 < worst < 2e-6


# No shrinking: each example creates a trainer, and hundreds of them would take minutes without more information.
SOME = settings(
    max_examples=2,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
MANY = settings(SOME, max_examples=80, derandomize=False)


@pytest.mark.parametrize(("loss_type", "level", "correction"), part_of_grid(LOSS_TYPES, LEVELS, CORRECTIONS, every=4))
@SOME
@given(data=st.data())
def test_loss_and_gradients_match_trl(
    data: st.DataObject, loss_type: str, level: str, correction: str, oracle_model: Path
) -> None:
    _check(data, loss_type, level, correction, oracle_model)


@pytest.mark.long
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@MANY
@given(data=st.data())
def test_loss_and_gradients_match_trl_for_many_examples(
    data: st.DataObject, loss_type: str, level: str, correction: str, oracle_model: Path
) -> None:
    _check(data, loss_type, level, correction, oracle_model)
