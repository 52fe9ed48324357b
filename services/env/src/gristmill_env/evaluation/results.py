"""The figures of an evaluation, computed from its groups, and the file and the metrics row that report them.

results.json is made from groups.jsonl and the plan, and can be made again.
"""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.folders import EVALUATION_RESULTS_FILE
from gristmill.internal.disk import write_file
from gristmill.internal.metrics import MAX_TEXT
from gristmill.internal.saved import SavedCompletion, SavedGroup
from gristmill_env.evaluation.estimators import Estimate, majority, mean, pass_at_k, pass_ks, share
from gristmill_env.evaluation.plan import Plan
from gristmill_env.saved.summary import GroupStats, Values

QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
SOURCE = "eval"
"""Evaluations of `serve`."""
SOURCE_BY_HAND = "evaluate"
"""Evaluations of the command. They may sample differently, and do not replace the evaluations of `serve`."""
_PACKAGES = ("gristmill", "gristmill-env", "math-verify", "datasets", "transformers", "numpy")


@dataclass(frozen=True)
class Summary:
    """The figures. Shares are from 0 to 1; None if no completion or prompt counts for them."""

    passes: dict[int, Estimate]
    """pass@k for k = 1, 2, 4, ... and the number of samples, over the prompts with at least k judged completions."""
    mean: Estimate | None
    """mean@n: the share of right completions per prompt."""
    majority: Estimate | None
    """maj@n; None for one sample, or if the completions have no answer to vote on."""
    stats: GroupStats
    """Completions, tokens, truncation, and the values of the rewards and of the total."""
    asked: int
    """Prompts that were answered."""
    skipped: dict[str, int]
    """Skipped prompts by reason. No other figure includes them."""
    unextracted: float | None
    """Share of judged completions that are not right and in which no final answer is found."""
    lengths: dict[float, float]
    """Quantiles of the completions' tokens; empty if the server reports no lengths."""
    all_right: float | None
    """Share of prompts whose completions are all right. They give no gradient."""
    all_wrong: float | None
    """Share of prompts whose completions are all wrong. They give no gradient either."""
    max_tokens: tuple[int, int] | None
    """Least and greatest value of max_tokens over the prompts."""
    versions: dict[str, int]
    """Completions by the weight labels that sampled them; "1.20+1.21" if the weights changed during a completion."""

    @property
    def rewards(self) -> dict[str, Values]:
        """The values of each reward, and of the total."""
        return {**self.stats.parts, "total": self.stats.rewards}

    @property
    def truncated(self) -> float | None:
        """Share of completions truncated at max_tokens."""
        return self.stats.truncated / self.stats.completions if self.stats.completions else None

    @property
    def length_mean(self) -> float | None:
        """Mean number of tokens in a completion; None if the server reports no lengths."""
        tokens = self.stats.tokens
        return sum(tokens) / len(tokens) if tokens else None


@dataclass(frozen=True)
class Evaluated:
    """A finished evaluation."""

    plan: Plan
    summary: Summary
    folder: Path
    started: float
    """Unix time, seconds."""
    ended: float
    resumed: int
    """Prompts finished by an earlier process. `started` to `ended` excludes them."""


def summarise(plan: Plan, groups: Sequence[SavedGroup]) -> Summary:
    """Returns the figures of `groups`, which may be a part of the plan's prompts."""
    answered = [group for group in groups if group.reason is None]
    stats = GroupStats.of(answered)
    judged = [kept for group in answered if (kept := [one for one in group.completions if one.right is not None])]
    whole = [group for group in judged if len(group) == plan.samples]
    room = [group.sampling.max_tokens for group in answered if group.sampling is not None]
    versions = ("+".join(one.versions) for group in answered for one in group.completions if one.versions)
    return Summary(
        passes={k: estimate for k in pass_ks(plan.samples) if (estimate := _pass(judged, k)) is not None},
        mean=share(_right(group) / len(group) for group in judged),
        majority=_majority(whole) if plan.compares and plan.samples > 1 else None,
        stats=stats,
        asked=len(answered),
        skipped=dict(Counter(group.reason for group in groups if group.reason is not None)),
        unextracted=_unextracted(judged) if plan.compares else None,
        lengths=dict(zip(QUANTILES, np.quantile(stats.tokens, QUANTILES).tolist(), strict=True))
        if stats.tokens
        else {},
        all_right=_share(_right(group) == len(group) for group in whole),
        all_wrong=_share(_right(group) == 0 for group in whole),
        max_tokens=(min(room), max(room)) if room else None,
        versions=dict(Counter(versions)),
    )


def estimates(plan: Plan, summary: Summary) -> dict[str, Estimate]:
    """Returns pass@k and, for several completions per prompt, mean@n and maj@n."""
    estimated: dict[str, Estimate | None] = {f"pass@{k}": estimate for k, estimate in summary.passes.items()}
    if plan.samples > 1:
        estimated |= {f"mean@{plan.samples}": summary.mean, f"maj@{plan.samples}": summary.majority}
    return {name: estimate for name, estimate in estimated.items() if estimate is not None}


def metrics(plan: Plan, summary: Summary) -> dict[str, float]:
    """Returns all known figures by name, rewards as reward/NAME, and standard errors as NAME_stderr."""
    found: dict[str, float] = {}
    estimated: dict[str, Estimate | None] = {f"mean@{plan.samples}": summary.mean, **estimates(plan, summary)}
    estimated |= {
        name if name == "total" else f"reward/{name}": mean(values.means) for name, values in summary.rewards.items()
    }
    for name, estimate in estimated.items():
        if estimate is not None:
            found[name] = estimate.value
            if estimate.stderr is not None:
                found[f"{name}_stderr"] = estimate.stderr
    shares = {
        "extraction_failures": summary.unextracted,
        "truncated": summary.truncated,
        "completion_tokens_mean": summary.length_mean,
        "all_right": summary.all_right,
        "all_wrong": summary.all_wrong,
    }
    return found | {name: value for name, value in shares.items() if value is not None}


def row(evaluations: Mapping[str | None, Evaluated]) -> dict[str, Any]:
    """Returns the values of the metrics row: the figures by name, and the settings behind them.

    `evaluations`: by name. The name comes before each value: NAME/pass@1.
    """
    return {
        key if name is None else f"{name}/{key}": value
        for name, evaluated in evaluations.items()
        for key, value in _values(evaluated).items()
    }


def _values(evaluated: Evaluated) -> dict[str, Any]:
    plan, summary = evaluated.plan, evaluated.summary
    return {
        **metrics(plan, summary),
        "errors": {name: values.errors for name, values in summary.stats.parts.items()},
        "prompts": summary.asked,
        "prompts_skipped": sum(summary.skipped.values()),
        "training_rows": plan.training_rows or 0,
        "samples": plan.samples,
        "temperature": plan.sampling.temperature,
        "seconds": evaluated.ended - evaluated.started,
        "versions": ",".join(summary.versions)[:MAX_TEXT],
        "dataset": plan.dataset[:MAX_TEXT],
    }


def write_results(evaluated: Evaluated) -> None:
    """Writes results.json to the evaluation's folder."""
    plan, summary = evaluated.plan, evaluated.summary
    least, most = summary.max_tokens or (plan.sampling.max_tokens, plan.sampling.max_tokens)
    made = {
        "task": plan.task,
        "model": plan.model,
        "weights": plan.weights,
        "dataset": plan.dataset,
        "figures": metrics(plan, summary),
        "intervals": {
            name: [estimate.low, estimate.high] for name, estimate in estimates(plan, summary).items()
        },
        "rewards": {
            name: {"min": values.low, "max": values.high, "scored": values.count, "skipped": values.skipped,
                   "errors": values.errors} if values.count else {"skipped": values.skipped, "errors": values.errors}
            for name, values in summary.rewards.items()
        },
        "decides": plan.decides,
        "prompts": summary.asked,
        "rows": plan.rows,
        "skipped": summary.skipped,
        "training_rows": plan.training_rows,
        "completions": summary.stats.completions,
        "completion_tokens": {f"{quantile:g}": value for quantile, value in summary.lengths.items()},
        "versions": summary.versions,
        "sampling": {
            "samples": plan.samples, "temperature": plan.sampling.temperature, "top_p": plan.sampling.top_p,
            "max_tokens": most, "max_tokens_least": least,
        },
        "settings": plan.settings,
        "digest": plan.digest,
        "started": evaluated.started,
        "seconds": evaluated.ended - evaluated.started,
        "resumed_prompts": evaluated.resumed,
        "packages": _versions(),
    }  # fmt: skip
    write_file(evaluated.folder / EVALUATION_RESULTS_FILE, json.dumps(made, indent=2, ensure_ascii=False).encode())


def _versions() -> Mapping[str, str]:
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # run from its sources
            versions[name] = "unknown"
    return versions


def _right(group: Sequence[SavedCompletion]) -> int:
    return sum(bool(one.right) for one in group)


def _pass(judged: Sequence[Sequence[SavedCompletion]], k: int) -> Estimate | None:
    return share(pass_at_k(len(group), _right(group), k) for group in judged if len(group) >= k)


def _unextracted(judged: Sequence[Sequence[SavedCompletion]]) -> float | None:
    return _share(one.extracted is None and not one.right for group in judged for one in group)


def _majority(whole: Sequence[Sequence[SavedCompletion]]) -> Estimate | None:
    return share(majority([(one.extracted, bool(one.right)) for one in group]) for group in whole)


def _share(values: Iterable[bool]) -> float | None:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else None
