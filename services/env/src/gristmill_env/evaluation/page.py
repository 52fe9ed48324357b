"""An evaluation as one self-contained HTML file, in the look of the other reports."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from gristmill.disk import complete_file
from gristmill.redaction import redact
from gristmill_env.evaluation.estimators import Estimate
from gristmill_env.evaluation.results import Evaluated, RewardFigures
from gristmill_env.evaluation.samples import PromptRecord, read_samples
from gristmill_view.report import Reports

logger = logging.getLogger(__name__)
PAGE_FILE: Final = "report.html"
_MOST_PROMPTS: Final = 1000
"""Prompts that the page shows. A page of more would be slow; samples.jsonl has all of them."""
_LONG: Final = 8000


def write_evaluation_page(evaluated: Evaluated) -> Path:
    """Writes report.html in the evaluation's folder, completely or not at all, and returns its path.

    Raises EvaluationError if the samples cannot be read, and OSError.
    """
    plan, summary = evaluated.plan, evaluated.summary
    records = read_samples(evaluated.folder)
    script = (files("gristmill_env.saved") / "templates" / "groups.js").read_text(encoding="utf-8")
    estimates = summary.estimates(plan.samples)
    weights = f", weights {plan.weights}" if plan.weights else ""
    parts = Reports("gristmill_env.evaluation").render(
        "evaluation.html",
        f"Evaluation of {plan.task}",
        script,
        origin=f"model {plan.model}{weights} on {plan.dataset}; {plan.samples} per prompt, {plan.how}",
        facts=list(_facts(evaluated, estimates)),
        estimates=[(name, *_estimate(estimate)) for name, estimate in estimates.items()],
        rewards=[(name, *_reward(one)) for name, one in {**summary.rewards, "total": summary.total}.items()],
        decides=plan.decides,
        skipped=summary.skipped,
        settings={name: str(value) for name, value in redact(plan.settings).items() if _shown(value)},
        prompts=[_prompt(record) for record in records[:_MOST_PROMPTS]],
        more=max(0, len(records) - _MOST_PROMPTS),
    )
    path = evaluated.folder / PAGE_FILE
    with complete_file(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as page:
        page.writelines(parts)
    return path


def _facts(evaluated: Evaluated, estimates: dict[str, Estimate]) -> Iterator[tuple[str, str, str]]:
    summary = evaluated.summary
    for name, estimate in list(estimates.items())[:1]:
        interval = "" if estimate.low is None else f"95 %: {_percent(estimate.low)} to {_percent(estimate.high)}"
        yield name, _percent(estimate.value), interval
    yield "prompts", str(summary.asked), f"{summary.completions} completions"
    if evaluated.plan.training_rows:
        yield "training rows", str(evaluated.plan.training_rows), f"of {evaluated.plan.prompts} prompts"
    if summary.unextracted is not None:
        yield "no answer found", _percent(summary.unextracted), "of the completions"
    if summary.truncated is not None:
        yield "cut short", _percent(summary.truncated), "completions without their end"
    if summary.length_mean is not None:
        yield "tokens", f"{summary.length_mean:.0f}", "mean per completion"
    yield "time", f"{evaluated.ended - evaluated.started:.1f} s", "of this process"


def _estimate(estimate: Estimate) -> tuple[str, str, str, str]:
    interval = "–" if estimate.low is None else f"{_percent(estimate.low)} to {_percent(estimate.high)}"
    error = "–" if estimate.stderr is None else f"{100 * estimate.stderr:.2g}"
    return _percent(estimate.value), error, interval, str(estimate.prompts)


def _reward(figures: RewardFigures) -> Sequence[str]:
    mean = "–" if figures.mean is None else f"{figures.mean.value:.4g}"
    ends = ["–" if value is None else f"{value:.4g}" for value in (figures.low, figures.high)]
    return (mean, *ends, str(figures.scored), str(figures.skipped), str(figures.errors))


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.3g} %"


def _shown(value: Any) -> bool:
    """Returns whether the page shows a setting. `params` of rewards and environments may hold keys."""
    return value is not None and not isinstance(value, dict | list)


def _prompt(record: PromptRecord) -> dict[str, Any]:
    judged = [sample for sample in record.samples if sample.right is not None]
    totals = [sample.total for sample in record.samples if sample.total is not None]
    mean = sum(totals) / len(totals) if totals else None
    right = sum(bool(sample.right) for sample in judged)
    return {
        "index": record.index,
        "prompt": record.prompt[:_LONG],
        "answer": record.answer,
        "skipped": record.why or record.skipped,
        "samples": [(sample, sample.text[:_LONG], len(sample.text) > _LONG) for sample in record.samples],
        "right": right,
        "judged": len(judged),
        "data": {
            "number": str(record.number),
            "mean": "" if mean is None else repr(mean),
            "spread": repr(max(totals) - min(totals)) if totals else "",
            "tokens": str(max((sample.tokens or 0 for sample in record.samples), default=0)),
            "same": "1" if len(judged) == right or right == 0 else "",
            "cut": "1" if any(sample.finish_reason == "length" for sample in record.samples) else "",
            "failed": "1" if any(sample.failed for sample in record.samples) else "",
        },
    }
