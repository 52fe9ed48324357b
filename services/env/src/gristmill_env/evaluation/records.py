"""The record of one evaluated prompt: a line of samples.jsonl."""

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
    """Number of tokens; None if the server does not report it."""
    finish_reason: str
    """ "stop", or "length" for a truncated completion."""
    answer: str | None
    """The final answer that the deciding reward extracts, in a normal form. None: no answer was found, or the reward
    returned no value."""
    right: bool | None
    """Verdict of the deciding reward; None if the reward returned no value or failed."""
    total: float | None
    parts: dict[str, float | None]
    """Each reward's value, unweighted; None if the reward skipped the completion or failed."""
    error: str | None = None
    """The first failed reward with a weight, and its error. The completion then has no total."""
    failed: dict[str, str] = {}
    """Every failed reward and its error, including parts, composed rewards and metrics."""
    versions: list[str]
    """Weight labels that sampled the completion, in order; empty if the server reports no label."""


class PromptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt with its completions, or the reason for having no completions."""

    number: int
    """The prompt's place in the evaluation, from 0."""
    index: int
    """The prompt's row in the data set."""
    prompt: str
    """The prompt as the model saw it."""
    answer: str | None
    """The row's own answer."""
    prompt_tokens: int
    max_tokens: int
    """Maximum number of tokens in each completion."""
    samples: list[SampleRecord]
    skipped: str | None = None
    """Reason for having no completions: a `DropReason`, such as "too_long", "bad_row" or "timeout"."""
    why: str | None = None
    """The reason in a sentence."""


def answered(number: int, rollout: Rollout, decision: Decision) -> PromptRecord:
    """Returns the record of a prompt that has completions. `decision`: of the rewards that scored them."""
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
    """Returns the record of a skipped prompt. An evaluation takes rows in order, so the number is also the row."""
    return PromptRecord(
        number=number, index=number, prompt="", answer=None, prompt_tokens=0, max_tokens=0, samples=[],
        skipped=reason.value, why=redact_text(why),
    )  # fmt: skip
