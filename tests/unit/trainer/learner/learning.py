"""A learner on the small model, samples for it, and the changes of its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from gristmill_trainer.data.types import Sample
from gristmill_trainer.learner import Learner

Build = Callable[..., Learner]


def make_samples(count: int = 8, seed: int = 0) -> list[Sample]:
    """Sequences of different lengths, in groups of two. Rollout log-probabilities are close to a random model's."""
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
    """Returns the optimizer's whole state."""
    return [value.clone() for state in learner.optimizer.state.values() for value in state.values()]


def assert_same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(other[name], tensor) for name, tensor in one.items())


def farthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((other[name] - tensor).abs().max()) for name, tensor in one.items())


def teach(learner: Learner, samples: Sequence[Sample], steps: int = 2) -> list[float]:
    return [learner.step(samples, step).loss for step in range(1, steps + 1)]
