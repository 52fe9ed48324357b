"""Builds the group to train on from a rollout, or returns the reason for dropping the rollout."""

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
from gristmill_env.rollouts.transcript import Attempt, Rollout

logger = logging.getLogger(__name__)

Scalar = TypeVar("Scalar", bound=np.generic)

_SAME = 1e-9
"""Totals whose difference is less than this are the same, because sums of equal parts may differ in the last bits."""


def trainable(rollout: Rollout) -> list[int]:
    """Returns indices of the attempts that have a total and a token to train on. The other attempts leave the group."""
    pairs = zip(rollout.attempts, rollout.scores, strict=True)
    return [n for n, (attempt, score) in enumerate(pairs) if score.total is not None and any(attempt.mask)]


def drop_reason(rollout: Rollout, *, ensure_scores_are_not_same: bool) -> DropReason | None:
    """Returns the reason why the rollout must not become a group, or None."""
    totals = [total for n in trainable(rollout) if (total := rollout.scores[n].total) is not None]
    # A single attempt cannot be compared with another, unless group_size is 1.
    if len(totals) < min(2, len(rollout.scores)):
        failed = any(score.error is not None for score in rollout.scores)
        return DropReason.REWARD_ERROR if failed else DropReason.NO_SCORE
    # max - min instead of a standard deviation, because the deviation of equal floats need not be 0.
    if ensure_scores_are_not_same and len(totals) > 1 and max(totals) - min(totals) < _SAME:
        return DropReason.SAME_SCORES
    return None


def version_spans(attempt: Attempt, granted: str, *, published: bool) -> list[VersionSpan]:
    """Returns the spans of the attempt's sampled tokens by policy version.

    `granted`: the newest version when the permit was given. `published`: whether the run's trainer updates the server.
    If not, the server's labels carry no information, and all tokens count as `granted`.

    Raises UnpublishedWeightsError when a label is not a policy version. Another model sampled those tokens, and
    training would treat them as samples of the current model.
    """
    if not published:
        return [VersionSpan(granted, 0, len(attempt.token_ids))]
    try:
        spans = [VersionSpan(str(PolicyVersion.parse(s.version)), s.start, s.end) for s in attempt.labels]
    except ValueError as error:
        raise UnpublishedWeightsError(
            "weights_unpublished",
            f"the model server sampled by weights that this run's trainer has not published ({error}); restart the "
            "trainer, so that it publishes them, or set publisher: none if it never does",
        ) from error
    if sum(span.end - span.start for span in spans) != attempt.sampled:
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
    rollout: Rollout,
    permit: Permit,
    run_id: str,
    env_id: str,
    versions: list[list[VersionSpan]],
    *,
    include_messages: bool = False,
) -> TrajectoryGroup:
    """Returns the group of a rollout's trainable attempts. `versions`: a list of spans per attempt of the rollout.

    The token ids are the ids that were sent and sampled; nothing is tokenized here. Raises GroupError.
    """
    kept = trainable(rollout)
    attempts = [rollout.attempts[n] for n in kept]
    scores = [rollout.scores[n] for n in kept]
    prompts = [attempt.prompt.token_ids for attempt in attempts]
    completions = [attempt.token_ids for attempt in attempts]
    given = [np.zeros(len(prompt), np.bool_) for prompt in prompts]
    """Log-probabilities and mask of the prompts: 0 and False."""
    return TrajectoryGroup(
        group_id=permit.group_id,
        run_id=run_id,
        env_id=env_id,
        row=permit.row,
        lengths=np.array([len(prompt) + len(ids) for prompt, ids in zip(prompts, completions, strict=True)], np.int32),
        tokens=_joined(prompts, completions, np.int32),
        logprobs=_joined(given, [attempt.logprobs for attempt in attempts], np.float32),
        mask=_joined(given, [attempt.mask for attempt in attempts], np.bool_),
        rewards=np.array([score.total for score in scores], np.float32),
        reward_parts={name: [score.parts[name] for score in scores] for name in scores[0].parts},
        finish_reasons=[attempt.finish_reason for attempt in attempts],
        sampling=rollout.sampling,
        versions=[versions[n] for n in kept],
        messages=_messages(rollout, kept) if include_messages else None,
    )


def _joined(prompts: Iterable[ArrayLike], completions: Iterable[ArrayLike], dtype: type[Scalar]) -> NDArray[Scalar]:
    """Returns one array in which each prompt is followed by its completion."""
    parts = [part for pair in zip(prompts, completions, strict=True) for part in pair]
    return np.concatenate([np.asarray(part, dtype) for part in parts])


def _messages(rollout: Rollout, kept: list[int]) -> list[list[dict[str, object]]] | None:
    """Returns the kept attempts' conversations, or None if they are too large for a group."""
    messages = [[dict(message) for message in rollout.attempts[n].messages] for n in kept]
    size = len(msgspec.msgpack.encode(messages))
    if size <= MAX_OBJECT_BYTES // 2:  # the other half is for the group's required data
        return messages
    logger.warning(
        "the messages of row %d take %d bytes; its group goes without them (at most %d)",
        rollout.item.index,
        size,
        MAX_OBJECT_BYTES // 2,
    )
    return None
