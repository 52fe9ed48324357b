"""However a batch is divided, packed or distributed over micro-batches, a step is the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.support.grids import part_of_grid
from tests.unit.trainer.learner.learning import Build, farthest, make_samples, teach, weights

CUTS: dict[str, dict[str, Any]] = {
    "padded": {"packing": False},
    "token budget": {"token_budget": 24},
    "token budget, padded": {"token_budget": 24, "packing": False},
    "accumulated": {"batch_size": 2, "gradient_accumulation_steps": 4},
    "one by one": {"batch_size": 1, "gradient_accumulation_steps": 8},
    "checkpointed": {"gradient_checkpointing": True},
}


@pytest.mark.parametrize(
    ("objective", "cut"), part_of_grid(["dapo", "grpo", "dr_grpo", "cispo", "gspo"], CUTS, every=4)
)
def test_step_does_not_depend_on_the_micro_batches(build: Build, objective: str, cut: str) -> None:
    settings = {"objective": objective, "entropy_coef": 0.01, "plain": True, "max_grad_norm": 1e6}
    whole, pieces = build(**settings), build(**settings, **CUTS[cut])
    before = weights(whole)
    samples = make_samples()
    assert teach(pieces, samples) == pytest.approx(teach(whole, samples), abs=1e-6)
    assert farthest(weights(pieces), weights(whole)) <= 1e-6
    assert farthest(before, weights(whole)) > 1e-4


@pytest.mark.parametrize("cut", ["padded", "token budget"])
def test_bnpo_depends_on_local_batches_and_not_on_packing(build: Build, cut: str) -> None:
    settings = {"objective": "bnpo", "plain": True, "max_grad_norm": 1e6}
    plain, other = build(**settings, batch_size=2), build(**settings, batch_size=2, **CUTS[cut])
    larger = build(**settings, batch_size=8)
    samples = make_samples()
    losses = teach(plain, samples)
    assert teach(other, samples) == pytest.approx(losses, abs=1e-6)
    assert farthest(weights(other), weights(plain)) <= 1e-6
    assert abs(teach(larger, samples)[0] - losses[0]) > 1e-4


def test_sequence_without_trained_tokens_counts_and_has_no_gradient(build: Build) -> None:
    samples = make_samples()
    filtered = [*samples[:7], replace(samples[7], trained=np.zeros_like(samples[7].trained))]
    one, other = build(objective="grpo"), build(objective="grpo", batch_size=1)
    losses = teach(one, filtered)
    assert teach(other, filtered) == pytest.approx(losses, abs=1e-6)
    shorter = build(objective="grpo").step(samples[:7], 1).loss
    assert losses[0] == pytest.approx(shorter * 7 / 8, abs=1e-6)
    assert one.logprobs(filtered)[7].tolist() == [0.0] * len(samples[7])
