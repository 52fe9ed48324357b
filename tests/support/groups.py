"""Trajectory groups made from random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gristmill import SamplingParams, TrajectoryGroup, VersionSpan


def make_group(
    group_id: str = "g00000001",
    run_id: str = "test",
    lengths: Sequence[tuple[int, int]] = ((3, 4), (3, 2)),
    rewards: Sequence[float] | None = None,
    version: str = "1.0",
    seed: int = 0,
    vocabulary: int = 64,
    env_id: str = "env-1",
    rollouts: Sequence[int] | None = None,
) -> TrajectoryGroup:
    """`lengths`: (prompt, completion) tokens per sequence. `rollouts`: the rollout of each sequence.

    Log-probabilities are random, not from a model.
    """
    rng = np.random.default_rng(seed)
    total = sum(prompt + completion for prompt, completion in lengths)
    mask = np.concatenate([np.repeat([False, True], pair) for pair in lengths])
    logprobs = np.where(mask, -rng.exponential(size=total), 0.0).astype(np.float32)
    chosen = rng.normal(size=len(lengths)) if rewards is None else np.asarray(rewards)
    return TrajectoryGroup(
        group_id=group_id,
        run_id=run_id,
        env_id=env_id,
        row=int(group_id[1:]) if group_id[1:].isdigit() else 0,
        lengths=np.array([prompt + completion for prompt, completion in lengths], np.int32),
        tokens=rng.integers(0, vocabulary, size=total, dtype=np.int32),
        logprobs=logprobs,
        mask=mask,
        rewards=chosen.astype(np.float32),
        reward_parts={"length": [float(value) for value in chosen]},
        finish_reasons=["stop"] * len(lengths),
        sampling=SamplingParams(temperature=1.0, max_tokens=64),
        versions=[[VersionSpan(version, 0, completion)] for _, completion in lengths],
        rollouts=None if rollouts is None else np.array(rollouts, np.int32),
    )
