"""What one evaluated prompt leaves behind: a line of samples.jsonl."""

from __future__ import annotations

import msgspec

from gristmill.redaction import redact_text
from gristmill_env.drops import DropReason
from gristmill_env.rewards import Decision
from gristmill_env.rollout import Rollout


class SampleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One completion."""

    text: str
    tokens: int | None
    """Tokens it has; None where the server does not tell."""
    finish_reason: str
    """ "stop", or "length" when it was cut."""
    answer: str | None
    """The final answer it states to the deciding reward, in one form however it is written. None: it states none, or
    the reward said nothing of it."""
    right: bool | None
    """By the deciding reward; None where that said nothing, or failed."""
    total: float | None
    parts: dict[str, float | None]
    """Each reward's value, unweighted; None where it skipped or failed."""
    error: str | None = None
    """The first reward of weight that failed, and how: it has no total then."""
    failed: dict[str, str] = {}
    """Every reward that failed, and how: parts, what they are parts of, and metrics too."""
    versions: list[str]
    """Weight labels that sampled it, in order; empty where the server tells none."""


class PromptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt with its completions, or why there are none."""

    number: int
    """Its place in the evaluation, from 0."""
    index: int
    """Its row in the data set."""
    prompt: str
    """As the model saw it."""
    answer: str | None
    """The row's own answer."""
    prompt_tokens: int
    max_tokens: int
    """Most tokens its completions could have."""
    samples: list[SampleRecord]
    skipped: str | None = None
    """Why it has no completions: a `DropReason`, such as "too_long", "bad_row" or "timeout"."""
    why: str | None = None
    """The same in a sentence."""


def answered(number: int, rollout: Rollout, decision: Decision) -> PromptRecord:
    """The record of a prompt that has completions. `decision`: of the rewards that scored them."""
    samples = []
    for attempt, score in zip(rollout.attempts, rollout.scores, strict=True):
        right = decision.is_right(score.parts[decision.name])
        judged = decision.compares and right is not None
        samples.append(
            SampleRecord(
                text=attempt.text,
                tokens=attempt.sampled,
                finish_reason=attempt.finish_reason,
                answer=decision.reward.stated(attempt.text, rollout.item.columns) if judged else None,
                right=right,
                total=score.total,
                parts=dict(score.parts),
                error=score.error,
                failed={name: failure.text for name, failure in score.failed.items()},
                versions=list(dict.fromkeys(span.version for span in attempt.labels)),
            )
        )
    return PromptRecord(
        number=number,
        index=rollout.item.index,
        prompt=rollout.prompt.text,
        answer=rollout.item.answer,
        prompt_tokens=len(rollout.prompt.token_ids),
        max_tokens=rollout.sampling.max_tokens,
        samples=samples,
    )


def skipped(number: int, reason: DropReason, why: str) -> PromptRecord:
    """The record of a prompt that could not be asked. (An evaluation takes rows in order: its number is its row.)"""
    return PromptRecord(
        number=number, index=number, prompt="", answer=None, prompt_tokens=0, max_tokens=0, samples=[],
        skipped=reason.value, why=redact_text(why),
    )  # fmt: skip
