"""The files of an evaluation, in the formats that other tools read.

results.json has the format of lm-evaluation-harness' results_*.json. metrics.json has the format of lighteval, which
Atropos' evaluate_log also writes. Both are made from samples.jsonl and the plan, and can be made again.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from gristmill_env.durable import write_file
from gristmill_env.evaluation.estimators import Estimate
from gristmill_env.evaluation.plan import Plan
from gristmill_env.evaluation.summary import Summary

RESULTS_FILE, METRICS_FILE = "results.json", "metrics.json"
_PACKAGES = ("gristmill", "gristmill-env", "math-verify", "datasets", "transformers", "numpy")


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


_BAD = frozenset({"extraction_failures", "truncated", "all_wrong"})
_NEITHER = frozenset({"completion_tokens_mean"})


def _versions() -> Mapping[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # run from its sources
            found[name] = "unknown"
    return found
