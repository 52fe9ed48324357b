"""Computes the figures of an evaluation from the prompts' records."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gristmill_env.evaluation.estimators import Estimate, majority, mean, pass_at_k, pass_ks, share
from gristmill_env.evaluation.plan import Plan
from gristmill_env.evaluation.records import PromptRecord, SampleRecord

QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


@dataclass(frozen=True)
class RewardFigures:
    """One reward, or the total, over all completions."""

    mean: Estimate | None
    """Mean over prompts of the means of their scored completions; None when nothing was scored."""
    low: float | None
    high: float | None
    """Least and greatest value."""
    scored: int
    skipped: int
    """Completions for which the reward returned no value."""
    errors: int
    """Completions on which the reward failed. The mean excludes both these and the skipped completions."""


@dataclass(frozen=True)
class Summary:
    """The figures. Shares are from 0 to 1; None if no completion or prompt counts for them."""

    passes: dict[int, Estimate]
    """pass@k for k = 1, 2, 4, ... and the number of samples, over the prompts with at least k judged completions."""
    mean: Estimate | None
    """mean@n: the share of right completions per prompt."""
    majority: Estimate | None
    """maj@n; None for one sample, or if the completions have no answer to vote on."""
    rewards: dict[str, RewardFigures]
    total: RewardFigures
    asked: int
    """Prompts that were answered."""
    skipped: dict[str, int]
    """Skipped prompts by reason. No other figure includes them."""
    completions: int
    unextracted: float | None
    """Share of judged completions that are not right and in which no final answer is found."""
    truncated: float | None
    """Share of completions truncated at max_tokens."""
    lengths: dict[float, float]
    """Quantiles of the completions' tokens; empty if the server reports no lengths."""
    length_mean: float | None
    all_right: float | None
    """Share of prompts whose completions are all right. They give no gradient."""
    all_wrong: float | None
    """Share of prompts whose completions are all wrong. They give no gradient either."""
    max_tokens: tuple[int, int] | None
    """Least and greatest value of max_tokens over the prompts."""
    versions: dict[str, int]
    """Completions by the weight labels that sampled them; "1.20+1.21" if the weights changed during a completion."""


def summarise(plan: Plan, records: Sequence[PromptRecord]) -> Summary:
    """Returns the figures of `records`, which may be a part of the plan's prompts."""
    answered = [record for record in records if record.skipped is None]
    samples = [sample for record in answered for sample in record.samples]
    judged = [kept for record in answered if (kept := _judged(record))]
    whole = [group for group in judged if len(group) == plan.samples]
    lengths = [sample.tokens for sample in samples if sample.tokens is not None]
    room = [record.max_tokens for record in answered]
    return Summary(
        passes={k: estimate for k in pass_ks(plan.samples) if (estimate := _pass(judged, k)) is not None},
        mean=share(_right(group) / len(group) for group in judged),
        majority=_majority(whole) if plan.compares and plan.samples > 1 else None,
        rewards={name: _reward(answered, name) for name in dict.fromkeys(n for s in samples for n in s.parts)},
        total=_figures(answered, lambda sample: sample.total, lambda sample: sample.error is not None),
        asked=len(answered),
        skipped=dict(Counter(record.skipped for record in records if record.skipped is not None)),
        completions=len(samples),
        unextracted=_unextracted(judged) if plan.compares else None,
        truncated=_share(sample.finish_reason == "length" for sample in samples),
        lengths=dict(zip(QUANTILES, np.quantile(lengths, QUANTILES).tolist(), strict=True)) if lengths else {},
        length_mean=math.fsum(lengths) / len(lengths) if lengths else None,
        all_right=_share(_right(group) == len(group) for group in whole),
        all_wrong=_share(_right(group) == 0 for group in whole),
        max_tokens=(min(room), max(room)) if room else None,
        versions=dict(Counter("+".join(sample.versions) for sample in samples if sample.versions)),
    )


def _judged(record: PromptRecord) -> list[SampleRecord]:
    """Returns the completions that are known to be right or wrong."""
    return [sample for sample in record.samples if sample.right is not None]


def _right(group: Sequence[SampleRecord]) -> int:
    return sum(bool(sample.right) for sample in group)


def _pass(judged: Sequence[Sequence[SampleRecord]], k: int) -> Estimate | None:
    return share(pass_at_k(len(group), _right(group), k) for group in judged if len(group) >= k)


def _unextracted(judged: Sequence[Sequence[SampleRecord]]) -> float | None:
    return _share(sample.answer is None and not sample.right for group in judged for sample in group)


def _majority(whole: Sequence[Sequence[SampleRecord]]) -> Estimate | None:
    return share(majority([(sample.answer, bool(sample.right)) for sample in group]) for group in whole)


def _reward(answered: Sequence[PromptRecord], name: str) -> RewardFigures:
    return _figures(answered, lambda sample: sample.parts.get(name), lambda sample: name in sample.failed)


def _figures(
    answered: Sequence[PromptRecord],
    value: Callable[[SampleRecord], float | None],
    failed: Callable[[SampleRecord], bool],
) -> RewardFigures:
    scored = [[v for sample in record.samples if (v := value(sample)) is not None] for record in answered]
    values = [v for group in scored for v in group]
    samples = [sample for record in answered for sample in record.samples]
    errors = sum(failed(sample) for sample in samples)
    return RewardFigures(
        mean=mean(math.fsum(group) / len(group) for group in scored if group),
        low=min(values, default=None),
        high=max(values, default=None),
        scored=len(values),
        skipped=len(samples) - len(values) - errors,
        errors=errors,
    )


def _share(values: Iterable[bool]) -> float | None:
    known = list(values)
    return sum(known) / len(known) if known else None
