"""Builds the group to train on from a group, or returns the reason for dropping the group."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from gristmill import Permit, PolicyVersion, TrajectoryGroup, VersionSpan
from gristmill.group import MAX_OBJECT_BYTES
from gristmill_env.errors import DropReason, UnpublishedWeightsError
from gristmill_env.rollouts.transcript import Rollout, RolloutGroup

logger = logging.getLogger(__name__)

Scalar = TypeVar("Scalar", bound=np.generic)

_SAME = 1e-9
"""Totals whose difference is less than this are the same, because sums of equal parts may differ in the last bits."""


def trainable(group: RolloutGroup) -> list[int]:
    """Returns indices of the rollouts that have a total and a token to train on. The other rollouts leave the group."""
    pairs = zip(group.rollouts, group.scores, strict=True)
    return [n for n, (rollout, score) in enumerate(pairs) if score.total is not None and any(rollout.mask)]


def drop_reason(group: RolloutGroup, *, ensure_scores_are_not_same: bool) -> DropReason | None:
    """Returns the reason why the group must not become a group, or None."""
    totals = [total for n in trainable(group) if (total := group.scores[n].total) is not None]
    # A single rollout cannot be compared with another, unless group_size is 1.
    if len(totals) < min(2, len(group.scores)):
        failed = any(score.error is not None for score in group.scores)
        return DropReason.REWARD_ERROR if failed else DropReason.NO_SCORE
    # max - min instead of a standard deviation, because the deviation of equal floats need not be 0.
    if ensure_scores_are_not_same and len(totals) > 1 and max(totals) - min(totals) < _SAME:
        return DropReason.SAME_SCORES
    return None


def version_spans(rollout: Rollout, granted: str, *, published: bool) -> list[VersionSpan]:
    """Returns the spans of the rollout's sampled tokens by policy version.

    `granted`: the newest version when the permit was given. `published`: whether the run's trainer updates the server.
    If not, the server's labels carry no information, and all tokens count as `granted`.

    Raises UnpublishedWeightsError when a label is not a policy version. Another model sampled those tokens, and
    training would treat them as samples of the current model.
    """
    if not published:
        return [VersionSpan(granted, 0, len(rollout.token_ids))]
    try:
        spans = [VersionSpan(str(PolicyVersion.parse(s.version)), s.start, s.end) for s in rollout.labels]
    except ValueError as error:
        raise UnpublishedWeightsError(
            "weights_unpublished",
            f"the model server sampled by weights that this run's trainer has not published ({error}); restart the "
            "trainer, so that it publishes them, or set publisher: none if it never does",
        ) from error
    if sum(span.end - span.start for span in spans) != rollout.sampled:
        raise UnpublishedWeightsError(
            "weight_label_missing",
            "the model server returned tokens without a weight label; serve it with `python -m gristmill_model`, or "
            "set publisher: none if no trainer publishes to it",
        )
    return spans


def is_version(label: str) -> bool:
    """Returns whether a server's label is a policy version ("1.20"), not vLLM's "default"."""
    try:
        PolicyVersion.parse(label)
    except ValueError:
        return False
    return True


def build_group(
    group: RolloutGroup,
    permit: Permit,
    run_id: str,
    env_id: str,
    versions: list[list[VersionSpan]],
    *,
    include_messages: bool = False,
) -> TrajectoryGroup:
    """Returns the group of a group's trainable rollouts. `versions`: a list of spans per rollout of the group.

    The token ids are the ids that were sent and sampled; nothing is tokenized here. Raises GroupError.
    """
    kept = trainable(group)
    rollouts = [group.rollouts[n] for n in kept]
    scores = [group.scores[n] for n in kept]
    prompts = [rollout.prompt.token_ids for rollout in rollouts]
    completions = [rollout.token_ids for rollout in rollouts]
    given = [np.zeros(len(prompt), np.bool_) for prompt in prompts]
    """Log-probabilities and mask of the prompts: 0 and False."""
    return TrajectoryGroup(
        group_id=permit.group_id,
        run_id=run_id,
        env_id=env_id,
        row=permit.row,
        lengths=np.array([len(prompt) + len(ids) for prompt, ids in zip(prompts, completions, strict=True)], np.int32),
        tokens=_joined(prompts, completions, np.int32),
        logprobs=_joined(given, [rollout.logprobs for rollout in rollouts], np.float32),
        mask=_joined(given, [rollout.mask for rollout in rollouts], np.bool_),
        rewards=np.array([score.total for score in scores], np.float32),
        reward_parts={name: [score.parts[name] for score in scores] for name in scores[0].parts},
        finish_reasons=[rollout.finish_reason for rollout in rollouts],
        sampling=group.sampling,
        versions=[versions[n] for n in kept],
        messages=_messages(group, kept) if include_messages else None,
    )


def _joined(prompts: Iterable[ArrayLike], completions: Iterable[ArrayLike], dtype: type[Scalar]) -> NDArray[Scalar]:
    """Returns one array in which each prompt is followed by its completion."""
    parts = [part for pair in zip(prompts, completions, strict=True) for part in pair]
    return np.concatenate([np.asarray(part, dtype) for part in parts])


def _messages(group: RolloutGroup, kept: list[int]) -> list[list[dict[str, object]]] | None:
    """Returns the kept rollouts' conversations, or None if they are too large for a group."""
    messages = [[dict(message) for message in group.rollouts[n].messages] for n in kept]
    size = len(msgspec.msgpack.encode(messages))
    if size <= MAX_OBJECT_BYTES // 2:  # the other half is for the group's required data
        return messages
    logger.warning(
        "the messages of row %d take %d bytes; its group goes without them (at most %d)",
        group.item.index,
        size,
        MAX_OBJECT_BYTES // 2,
    )
    return None
