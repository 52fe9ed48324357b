"""Rollouts as the exact tokens that were sent and sampled, and the group to train on that they form.

The branches of a rollout's turns become a `Rollout`. The scored rollouts of one item are a `RolloutGroup`.
`build_group` makes the group to train on, and `drop_reason` names the reason if there is none.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from gristmill import Permit, PolicyVersion, SamplingParams, TrajectoryGroup, VersionSpan
from gristmill.group import MAX_OBJECT_BYTES, SOURCE, TOOLS
from gristmill.internal.redaction import redact_text
from gristmill_env.data import Item, Message
from gristmill_env.errors import DropReason, EnvError, RewardError, UnpublishedWeightsError
from gristmill_env.gateway import Branch
from gristmill_env.inference import LabelSpan
from gristmill_env.rewards import CorrectnessReward, Score
from gristmill_env.rollouts.prompts import Prompt

logger = logging.getLogger(__name__)

Scalar = TypeVar("Scalar", bound=np.generic)

_LONGEST_ANSWER = 1000
"""Characters of an answer that a group carries for the table of rollouts."""
_LONGEST_TEXT = 20_000
"""Characters of a completion whose answer is extracted for the table of rollouts."""
_LONGEST_ERROR = 1000
"""Characters of a failed rollout's error in the records of its group."""
_SAME = 1e-9
"""Totals whose difference is less than this are the same, because sums of equal parts may differ in the last bits."""


@dataclass(frozen=True)
class Rollout:
    """A finished rollout of an item. C: number of tokens after the prompt, including tokens between replies."""

    prompt: Prompt
    token_ids: list[int]
    """[C]"""
    logprobs: list[float]
    """[C]: log-probability under the distribution from which a token was drawn; 0 where the mask is False."""
    mask: list[bool]
    """[C]: True for tokens that were sampled and are trained on."""
    labels: list[LabelSpan]
    """The server's weight labels, by position in `token_ids`."""
    text: str
    """The last reply without the tokens that end a turn, including its beginning in the prompt (`Prompt.begun`)."""
    messages: tuple[Message, ...]
    """The whole conversation."""
    finish_reason: str
    """ "stop"; "length" when a reply was truncated or no room was left; "turns" when the turns were used up; "error" if
    the rollout is unfinished (`EnvError.unfinished`)."""
    replies: int
    sampled: int | None
    """Tokens sampled, trained on or not; None if a text server does not report the number."""
    reward: float | None = None
    """The sum of the environment's rewards, or the agent's reward; None if there is none."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The named parts of an agent's reward."""
    others: tuple[Rollout, ...] = ()
    """Earlier branches of an agent's rollout, as sequences of their own: sub-agents, retries, shortened histories."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Facts about an agent's requests, for the log (`gateway.Turns.counts`)."""

    @classmethod
    def of(cls, branch: Branch, prompt: Prompt, text: str, reward: float | None) -> Rollout:
        """Returns a branch as a rollout of one sequence. `text`: of its last reply."""
        return cls(
            prompt=prompt,
            token_ids=branch.token_ids.tolist(),
            logprobs=branch.logprobs.tolist(),
            mask=branch.mask.tolist(),
            labels=branch.labels,
            text=text,
            messages=branch.turns[-1].messages,
            finish_reason=branch.turns[-1].stored.finish_reason,
            replies=len(branch.turns),
            sampled=branch.sampled,
            reward=reward,
        )

    @property
    def branches(self) -> tuple[Rollout, ...]:
        """All sequences of the rollout; the last is this one."""
        return (*self.others, self)


@dataclass(frozen=True)
class RolloutGroup:
    """The rollouts of one item and their scores, in the same order; without scores until they are scored."""

    item: Item
    sampling: SamplingParams
    rollouts: list[Rollout]
    scores: list[Score]
    seconds: float
    """For the rollouts and the scores."""
    failed: Sequence[EnvError] = ()
    """The errors of the rollouts that failed and were left out of the group."""

    @property
    def prompt(self) -> Prompt:
        """The first rollout's prompt; the others have the same prompt if the environment gives them the same task."""
        return self.rollouts[0].prompt


def joined(branches: Sequence[Branch], replies: int, part: Callable[[Branch], Rollout]) -> Rollout | None:
    """Returns branches as one rollout; None if there are none. The last branch has the newest reply.

    `replies`: of the whole rollout. `part`: returns a branch as a rollout of one sequence. A branch without a token to
    train on is left out, unless it is the last.
    """
    if not branches:
        return None
    *others, last = sorted(branches, key=lambda branch: branch.turns[-1].number)
    kept = tuple(part(branch) for branch in others if branch.mask.any())
    return dataclasses.replace(part(last), others=kept, replies=replies)


def failures(errors: Sequence[EnvError]) -> list[dict[str, str]]:
    """Returns the form of failed rollouts in the records of groups: `error`, a code, and `text`."""
    return [{"error": error.code, "text": redact_text(str(error))[:_LONGEST_ERROR]} for error in errors]


def trainable(group: RolloutGroup) -> list[int]:
    """Returns indices of the rollouts that have a total and a token to train on. The other rollouts leave the group."""
    pairs = zip(group.rollouts, group.scores, strict=True)
    return [
        n
        for n, (rollout, score) in enumerate(pairs)
        if score.total is not None and any(any(branch.mask) for branch in rollout.branches)
    ]


def drop_reason(group: RolloutGroup, *, least: int, ensure_scores_are_not_same: bool) -> DropReason | None:
    """Returns the reason why the rollouts must not be trained on, or None. `least`: rollouts that must have a score."""
    totals = [total for n in trainable(group) if (total := group.scores[n].total) is not None]
    if len(totals) < least:
        failed = any(score.error is not None for score in group.scores)
        return DropReason.REWARD_ERROR if failed else DropReason.NO_SCORE
    # max - min instead of a standard deviation, because the deviation of equal floats need not be 0.
    if ensure_scores_are_not_same and len(totals) > 1 and max(totals) - min(totals) < _SAME:
        return DropReason.SAME_SCORES
    return None


def mean_total(group: RolloutGroup) -> float:
    """Returns the mean total of the trainable rollouts; at least one."""
    totals = [total for n in trainable(group) if (total := group.scores[n].total) is not None]
    return sum(totals) / len(totals)


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
    correctness: CorrectnessReward | None = None,
) -> TrajectoryGroup:
    """Returns the group to train on: the trainable rollouts. `versions`: of each branch.

    `correctness`: finds the answers of completions for the table of rollouts. The token ids are the ids that were sent
    and sampled; nothing is tokenized here. Raises GroupError.
    """
    kept = trainable(group)
    rollouts = [group.rollouts[n] for n in kept]
    branches = [branch for rollout in rollouts for branch in rollout.branches]
    numbers = [number for number, rollout in enumerate(rollouts) for _ in rollout.branches]
    all_numbers = [number for number, rollout in enumerate(group.rollouts) for _ in rollout.branches]
    scores = [group.scores[kept[number]] for number in numbers]
    prompts = [branch.prompt.token_ids for branch in branches]
    completions = [branch.token_ids for branch in branches]
    given = [np.zeros(len(prompt), np.bool_) for prompt in prompts]
    """Log-probabilities and mask of the prompts: 0 and False."""
    messages = _messages(group, branches) if include_messages else None
    meta = _facts(group, rollouts, correctness)
    tools = branches[0].prompt.tools
    if messages is not None and tools and all(branch.prompt.tools == tools for branch in branches):
        meta[TOOLS] = list(tools)
    return TrajectoryGroup(
        group_id=permit.group_id,
        run_id=run_id,
        env_id=env_id,
        row=permit.row,
        lengths=np.array([len(prompt) + len(ids) for prompt, ids in zip(prompts, completions, strict=True)], np.int32),
        tokens=_joined(prompts, completions, np.int32),
        logprobs=_joined(given, [branch.logprobs for branch in branches], np.float32),
        mask=_joined(given, [branch.mask for branch in branches], np.bool_),
        rewards=np.array([score.total for score in scores], np.float32),
        reward_parts={name: [score.parts[name] for score in scores] for name in scores[0].parts},
        finish_reasons=[branch.finish_reason for branch in branches],
        sampling=group.sampling,
        versions=[spans for n, spans in zip(all_numbers, versions, strict=True) if n in kept],
        messages=messages,
        rollouts=np.array(numbers, np.int32) if len(branches) > len(rollouts) else None,
        meta=meta,
    )


def _facts(group: RolloutGroup, kept: list[Rollout], correctness: CorrectnessReward | None) -> dict[str, object]:
    """Returns what the table of rollouts shows (docs/look-at-a-run.md) and no other field of the group says."""
    facts: dict[str, object] = {"seconds": round(group.seconds, 3), "submitted_ms": int(time.time() * 1000)}
    facts["index"] = group.item.index
    if group.item.source is not None:
        facts[SOURCE] = group.item.source
    if group.failed:
        facts["failed"] = failures(group.failed)
    if group.item.answer is not None and len(group.item.answer) <= _LONGEST_ANSWER:
        facts["answer"] = group.item.answer
    # A user's own extraction does not run here, on the event loop.
    if correctness is not None and correctness.compares and not correctness.reward.runs_user_extraction:
        facts["extracted"] = [_extracted(rollout.text, group.item, correctness) for rollout in kept]
    return facts


def _extracted(text: str, item: Item, correctness: CorrectnessReward) -> str | None:
    """Returns the answer in a completion; None for long texts, whose extraction would hold up the event loop, and if
    the reward cannot say it, which its score reports."""
    if len(text) > _LONGEST_TEXT:
        return None
    try:
        extracted = correctness.reward.extracted(text, item.columns)
    except RewardError:
        return None
    return extracted if extracted is not None and len(extracted) <= _LONGEST_ANSWER else None


def _joined(prompts: Iterable[ArrayLike], completions: Iterable[ArrayLike], dtype: type[Scalar]) -> NDArray[Scalar]:
    """Returns one array in which each prompt is followed by its completion."""
    parts = [part for pair in zip(prompts, completions, strict=True) for part in pair]
    return np.concatenate([np.asarray(part, dtype) for part in parts])


def _messages(group: RolloutGroup, branches: list[Rollout]) -> list[list[dict[str, object]]] | None:
    """Returns the branches' conversations, or None if they are too large for a group."""
    messages = [[dict(message) for message in branch.messages] for branch in branches]
    size = len(msgspec.msgpack.encode((messages, branches[0].prompt.tools)))
    if size <= MAX_OBJECT_BYTES // 2:  # the other half is for the group's required data
        return messages
    logger.warning(
        "the messages of row %d take %d bytes; its group goes without them (at most %d)",
        group.item.index,
        size,
        MAX_OBJECT_BYTES // 2,
    )
    return None
