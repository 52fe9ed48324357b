"""From a rollout to the group that is trained on, or the reason why there is none."""

from __future__ import annotations

import numpy as np

from gristmill import Permit, TrajectoryGroup, VersionSpan
from gristmill_env.drops import DropReason
from gristmill_env.rollout import Rollout

_SAME = 1e-9
"""Totals nearer than this are the same: sums of the same parts may differ in their last bits."""


def drop_reason(rollout: Rollout, *, ensure_scores_are_not_same: bool) -> DropReason | None:
    """Why the rollout must not become a group; None when it may."""
    if any(score.error is not None for score in rollout.scores):
        return DropReason.REWARD_ERROR
    totals = [score.total for score in rollout.scores if score.total is not None]
    if len(totals) < len(rollout.scores):
        return DropReason.NO_SCORE
    # max - min, not a standard deviation: that of equal floats need not be 0.
    if ensure_scores_are_not_same and len(totals) > 1 and max(totals) - min(totals) < _SAME:
        return DropReason.SAME_SCORES
    return None


def build_group(
    rollout: Rollout, permit: Permit, run_id: str, env_id: str, versions: list[list[VersionSpan]]
) -> TrajectoryGroup:
    """The group of a rollout whose every score has a total. `versions`: a list of spans for each completion.

    The token ids are those that were sent and sampled; nothing is tokenized here. Raises GroupError.
    """
    prompt = list(rollout.prompt.token_ids)
    sizes = [len(completion.token_ids) for completion in rollout.completions]
    names = list(rollout.scores[0].parts)
    return TrajectoryGroup(
        group_id=permit.group_id,
        run_id=run_id,
        env_id=env_id,
        row=permit.row,
        lengths=np.array([len(prompt) + size for size in sizes], np.int32),
        tokens=np.array([token for c in rollout.completions for token in (*prompt, *c.token_ids)], np.int32),
        logprobs=np.array([value for c in rollout.completions for value in (*[0.0] * len(prompt), *c.logprobs)], "f4"),
        mask=np.array([trained for size in sizes for trained in (*[False] * len(prompt), *[True] * size)], np.bool_),
        rewards=np.array([score.total for score in rollout.scores], np.float32),
        reward_parts={name: [score.parts[name] for score in rollout.scores] for name in names},
        finish_reasons=[completion.finish_reason for completion in rollout.completions],
        sampling=rollout.sampling,
        versions=versions,
    )
