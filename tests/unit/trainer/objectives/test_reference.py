"""Loss and gradients compared with a plain float64 reference, including objectives that TRL lacks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.objective_reference import Sequence, reference_loss
from tests.support.trained_tokens import plain, random_tokens, weighted

from gristmill.hyperparameters import Hyperparameters
from gristmill_trainer.data.micro_batches import collate
from gristmill_trainer.data.types import Sample
from gristmill_trainer.learner import sample_weights
from gristmill_trainer.objectives import Objective, TrainedTokens

OBJECTIVES = ["grpo", "dapo", "bnpo", "dr_grpo", "cispo", "gspo"]
LENGTHS = [4, 1, 0, 6, 3]
LOCAL_BATCH, MAX_COMPLETION_LENGTH = 2, 12
STEP = 1e-6

KINDS: list[dict[str, Any]] = [
    *(
        {"importance_correction": how, "importance_level": level, "importance_cap": cap}
        for how, level, cap in itertools.product(["truncate", "mask"], ["token", "sequence"], [0.7, 2.0])
    ),
    *(
        {"importance_correction": how, "importance_level": level, "importance_floor": 0.8, "importance_cap": 1.5}
        for how, level in itertools.product(["truncate", "mask"], ["token", "sequence", "geometric"])
    ),
    {"ratio_policy": "rollout", "clip_epsilon": 0.1, "clip_epsilon_high": 0.4},
    {"ratio_policy": "rollout", "kl_beta": 0.3, "kl_bias_correction": True},
    *({"importance_correction": "none", "kl_beta": 0.3, "kl_estimator": name} for name in ("k1", "k2", "k3")),
    *({"kl_beta": 0.3, "kl_estimator": name, "kl_bias_correction": True} for name in ("k2", "k3")),
    *({"distill_coef": 0.7, "distill_divergence": direction} for direction in ("forward", "reverse")),
    {"entropy_coef": 0.05, "clip_epsilon": 0.1, "clip_epsilon_high": 0.4},
]


ROLLOUTS = {"single sequences": None, "branches": [0, 0, 1, 2, 2]}


def _loss(settings: Hyperparameters, tokens: TrainedTokens, rollouts: list[int] | None) -> torch.Tensor:
    numbers: Iterable[int | None] = rollouts or [None] * len(LENGTHS)
    samples = [_sample(length, number) for length, number in zip(LENGTHS, numbers, strict=True)]
    weights = sample_weights(samples, settings, MAX_COMPLETION_LENGTH)
    micro = collate(samples, range(len(samples)), weights, packing=True, device=torch.device("cpu"))
    tokens = weighted(tokens, weights)
    return Objective.of(settings).loss(replace(tokens, sequence=micro.sequence, sequences=micro.sequences))[0]


def _sample(trained: int, rollout: int | None) -> Sample:
    """A sample of a prompt of one token and `trained` trained tokens."""
    floats = np.zeros(1 + trained, np.float32)
    return Sample(
        "g1", np.zeros(1 + trained, np.int32), np.arange(1 + trained) > 0, floats, floats, 1.0, rollout=rollout
    )


def _slope(
    settings: Hyperparameters, sequences: list[Sequence], rollouts: list[int] | None, token: Any, name: str, entry: int
) -> float:
    """Returns the central difference of the reference."""

    def at(offset: float) -> float:
        before = getattr(token, name)
        if name == "teacher":
            moved = [(p, q + offset * (k == entry)) for k, (p, q) in enumerate(before)]
        else:
            moved = before + offset
        setattr(token, name, moved)
        loss = reference_loss(settings, sequences, LOCAL_BATCH, MAX_COMPLETION_LENGTH, rollouts)
        setattr(token, name, before)
        return loss

    return (at(STEP) - at(-STEP)) / (2 * STEP)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(str(value) for value in kind.values()))
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("rollouts", ROLLOUTS.values(), ids=ROLLOUTS)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)])
def test_loss_and_gradients_match_the_float64_reference(
    seed: int, rollouts: list[int] | None, objective: str, kind: dict[str, Any]
) -> None:
    settings = Hyperparameters.model_validate(
        {"objective": objective, "batch_size": LOCAL_BATCH, "distill_coef": 0.0, **kind}
    )
    tokens = random_tokens(seed, LENGTHS)
    sequences = plain(tokens)
    loss = _loss(settings, tokens, rollouts)
    expected = reference_loss(settings, sequences, LOCAL_BATCH, MAX_COMPLETION_LENGTH, rollouts)
    assert loss.item() == pytest.approx(expected, rel=1e-10, abs=1e-12)
    rounded = _loss(settings, random_tokens(seed, LENGTHS, torch.float32), rollouts)
    assert rounded.item() == pytest.approx(expected, abs=2e-6)

    loss.backward()  # type: ignore[no-untyped-call]
    flat = [token for sequence in sequences for token in sequence]
    for name, leaf in (("logprob", tokens.logprobs), ("entropy", tokens.entropy)):
        assert leaf is not None
        slopes = [_slope(settings, sequences, rollouts, token, name, 0) for token in flat]
        found = leaf.grad if leaf.grad is not None else torch.zeros(len(flat))
        np.testing.assert_allclose(found.numpy(), slopes, atol=1e-8, rtol=1e-6)
    if settings.distill_coef:
        assert tokens.student_logprobs is not None
        assert tokens.student_logprobs.grad is not None
        for token, found in zip(flat, tokens.student_logprobs.grad, strict=True):
            entries = range(len(token.teacher))
            slopes = [_slope(settings, sequences, rollouts, token, "teacher", k) for k in entries]
            np.testing.assert_allclose(found[: len(slopes)].numpy(), slopes, atol=1e-8, rtol=1e-6)
            assert not found[len(slopes) :].any()


def test_clips_without_settings_match_the_papers() -> None:
    clips = {name: Objective.of(Hyperparameters.model_validate({"objective": name})).clip for name in OBJECTIVES}
    assert {name: (clip.low, clip.high) for name, clip in clips.items()} == {
        "grpo": (0.2, 0.2),
        "dapo": (0.2, 0.28),
        "bnpo": (0.2, 0.2),
        "dr_grpo": (0.2, 0.2),
        "cispo": (0.2, 5.0),
        "gspo": (3e-4, 4e-4),
    }


@pytest.mark.parametrize(("objective", "high"), [("grpo", 0.1), ("dapo", 0.28), ("cispo", 5.0), ("gspo", 4e-4)])
def test_upper_clip_equals_the_lower_if_a_paper_has_one_clip(objective: str, high: float) -> None:
    clip = Objective.of(Hyperparameters.model_validate({"objective": objective, "clip_epsilon": 0.1})).clip
    assert (clip.low, clip.high) == (0.1, high)
