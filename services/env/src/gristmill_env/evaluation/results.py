"""The figures of an evaluation, computed from its records, and the files and the metrics row that report them.

results.json has the format of lm-evaluation-harness' results_*.json. metrics.json has the format of lighteval, which
Atropos' evaluate_log also writes. Both are made from samples.jsonl and the plan, and can be made again.
"""

from __future__ import annotations

import json
import math
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gristmill.disk import write_file
from gristmill_env.evaluation.estimators import Estimate, majority, mean, pass_at_k, pass_ks, share
from gristmill_env.evaluation.plan import Plan
from gristmill_env.evaluation.samples import PromptRecord, SampleRecord

RESULTS_FILE, METRICS_FILE = "results.json", "metrics.json"
QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
SOURCE = "eval"
"""Evaluations of `serve`."""
SOURCE_BY_HAND = "evaluate"
"""Evaluations of the command. They may sample differently, and do not replace the evaluations of `serve`."""
_PACKAGES = ("gristmill", "gristmill-env", "math-verify", "datasets", "transformers", "numpy")
_BAD = frozenset({"extraction_failures", "truncated", "all_wrong"})
_NEITHER = frozenset({"completion_tokens_mean"})


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

    def estimates(self, samples: int) -> dict[str, Estimate]:
        """Returns the shares of right answers by name, for `samples` completions per prompt."""
        found = {f"pass@{k}": estimate for k, estimate in self.passes.items()}
        several = {f"mean@{samples}": self.mean, f"maj@{samples}": self.majority} if samples > 1 else {}
        return found | {name: estimate for name, estimate in several.items() if estimate is not None}


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


def metrics(summary: Summary, samples: int) -> dict[str, float]:
    """Returns all known figures by name, rewards as reward/NAME, and standard errors as NAME_stderr."""
    found: dict[str, float] = {}
    estimates: dict[str, Estimate | None] = {f"pass@{k}": estimate for k, estimate in summary.passes.items()}
    estimates |= {f"mean@{samples}": summary.mean, f"maj@{samples}": summary.majority, "total": summary.total.mean}
    estimates |= {f"reward/{name}": figures.mean for name, figures in summary.rewards.items()}
    for name, estimate in estimates.items():
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


def row(evaluated: Evaluated) -> dict[str, Any]:
    """Returns the values of the metrics row: the figures by name, and the settings behind them."""
    plan, summary = evaluated.plan, evaluated.summary
    return {
        **metrics(summary, plan.samples),
        "errors": {name: figures.errors for name, figures in summary.rewards.items()},
        "prompts": summary.asked,
        "prompts_skipped": sum(summary.skipped.values()),
        "training_rows": plan.training_rows or 0,
        "samples": plan.samples,
        "temperature": plan.sampling.temperature,
        "seconds": evaluated.ended - evaluated.started,
        "versions": ",".join(summary.versions)[:256],
        "dataset": plan.dataset[:256],
    }


def write_results(evaluated: Evaluated) -> None:
    """Writes results.json and metrics.json to the samples' folder."""
    for name, made in ((RESULTS_FILE, _lm_eval(evaluated)), (METRICS_FILE, _lighteval(evaluated))):
        write_file(evaluated.folder / name, json.dumps(made, indent=2, ensure_ascii=False).encode())


def generation_parameters(plan: Plan, summary: Summary) -> dict[str, Any]:
    """Returns the sampling parameters that were really used."""
    least, most = summary.max_tokens or (plan.sampling.max_tokens, plan.sampling.max_tokens)
    return {
        "temperature": plan.sampling.temperature,
        "top_p": plan.sampling.top_p,
        "do_sample": not plan.greedy,
        "n": plan.samples,
        "max_new_tokens": most,
        "max_new_tokens_least": least,
    }


def _lighteval(evaluated: Evaluated) -> dict[str, Any]:
    plan, summary = evaluated.plan, evaluated.summary
    figures = metrics(summary, plan.samples)
    return {
        "config_general": {
            "model_name": plan.model,
            "total_evaluation_time_seconds": str(evaluated.ended - evaluated.started),
            "generation_parameters": generation_parameters(plan, summary),
        },
        "results": {f"gristmill|{plan.task}|0": figures, "all": figures},
    }


def _lm_eval(evaluated: Evaluated) -> dict[str, Any]:
    plan, summary, task = evaluated.plan, evaluated.summary, evaluated.plan.task
    parameters = generation_parameters(plan, summary)
    figures = metrics(summary, plan.samples)
    good = {name: name not in _BAD for name in figures if not name.endswith("_stderr") and name not in _NEITHER}
    return {
        "results": {task: {"alias": task, **{f"{name},none": value for name, value in figures.items()}}},
        "group_subtasks": {task: []},
        "configs": {
            task: {
                "task": task,
                "dataset_path": plan.settings.get("dataset_name") or plan.settings.get("dataset_path"),
                "dataset_name": plan.settings.get("dataset_config"),
                "test_split": plan.settings.get("split"),
                "doc_to_text": plan.settings.get("prompt_field"),
                "doc_to_target": plan.settings.get("answer_field"),
                "description": plan.settings.get("system_prompt") or "",
                "num_fewshot": 0,
                "output_type": "generate_until",
                "generation_kwargs": parameters,
                "repeats": plan.samples,
                "metric_list": [{"metric": name, "higher_is_better": up} for name, up in good.items()],
                "metadata": {"digest": plan.digest},
            }
        },
        "versions": {task: plan.digest[:12]},
        "n-shot": {task: 0},
        "higher_is_better": {task: good},
        "n-samples": {task: {"original": plan.rows, "effective": summary.asked}},
        "config": {
            "model": "gristmill",
            "model_args": f"pretrained={plan.model}",
            "limit": plan.prompts if plan.prompts < plan.rows else None,
            "gen_kwargs": parameters,
            "random_seed": None,
        },
        "date": evaluated.started,
        "start_time": evaluated.started,
        "end_time": evaluated.ended,
        "total_evaluation_time_seconds": str(evaluated.ended - evaluated.started),
        "model_source": "gristmill",
        "model_name": plan.model,
        "model_name_sanitized": plan.model.replace("/", "__"),
        "system_instruction": plan.settings.get("system_prompt"),
        "transformers_version": _versions().get("transformers"),
        "gristmill": {
            "dataset": plan.dataset,
            "weights": plan.weights,
            "digest": plan.digest,
            "resumed_prompts": evaluated.resumed,
            "decides": plan.decides,
            "settings": plan.settings,
            "summary": msgspec.to_builtins(asdict(summary), str_keys=True),
            "packages": _versions(),
        },
    }


def _versions() -> Mapping[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # run from its sources
            found[name] = "unknown"
    return found


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
