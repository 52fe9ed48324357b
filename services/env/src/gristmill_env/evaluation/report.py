"""Evaluations as tables and as a page, and comparisons as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Column, Table

from gristmill.internal.saved import SavedGroup
from gristmill_env.console import say
from gristmill_env.evaluation.compare import Comparison
from gristmill_env.evaluation.estimators import Estimate, mean
from gristmill_env.evaluation.plan import Plan, seen_in_training
from gristmill_env.evaluation.results import Evaluated, Summary, estimates
from gristmill_env.saved.page import Head, write_page
from gristmill_env.saved.summary import Values

PAGE_FILE: Final = "report.html"
_WIDE = 160


def show(console: Console, evaluated: Evaluated) -> None:
    """Shows all figures of an evaluation, and the folder of its results."""
    plan, summary = evaluated.plan, evaluated.summary
    say(console, f"{plan.task}: {_model(plan)} on {plan.dataset}")
    of = "" if plan.prompts == plan.rows else f" of {plan.rows}"
    say(
        console,
        f"{plan.prompts}{of} prompts, {_sampling(plan)}; a completion is right when {plan.decides} is 1 or more",
    )
    table = Table("figure", *[_right(name) for name in ("value", "std. error", "95 % interval", "prompts")])
    for name, estimate in estimates(plan, summary).items():
        table.add_row(name, *_estimate(estimate), str(estimate.prompts))
    _put(console, table)
    names = ("mean", "std. error", "min", "max", "scored", "skipped", "errors")
    rewards = Table("reward", *[_right(name) for name in names])
    for name, values in summary.rewards.items():
        rewards.add_row(name, *_reward(values))
    _put(console, rewards)
    for text in _facts(evaluated):
        say(console, text)


def write_evaluation_page(evaluated: Evaluated, groups: Sequence[SavedGroup]) -> Path:
    """Writes report.html in the evaluation's folder, completely or not at all, and returns its path. Raises OSError."""
    plan, summary = evaluated.plan, evaluated.summary
    estimated = estimates(plan, summary)
    facts = [("time", f"{evaluated.ended - evaluated.started:.1f} s", "of this process")]
    if (first := estimated.get("pass@1")) is not None:
        facts.insert(0, ("pass@1", _percent(first.value), f"95 %: {_interval(first, _percent)}"))
    if plan.training_rows:
        facts.append(("training rows", str(plan.training_rows), f"of {plan.prompts} prompts"))
    if summary.unextracted is not None:
        facts.append(("no answer found", _percent(summary.unextracted), "of the completions"))
    notes = [f"A completion is right when {plan.decides} is 1 or more.", *_not_asked(summary)]
    head = Head(
        origin=f"{_model(plan)} on {plan.dataset}; {_sampling(plan)}",
        facts=facts,
        estimates=[
            (name, _percent(one.value), "–" if one.stderr is None else f"{100 * one.stderr:.2g}",
             _interval(one, _percent), str(one.prompts))
            for name, one in estimated.items()
        ],
        note=" ".join(notes),
    )  # fmt: skip
    path = evaluated.folder / PAGE_FILE
    write_page(lambda: groups, path, f"Evaluation of {plan.task}", head)
    return path


def show_comparison(console: Console, comparison: Comparison) -> None:
    """Shows the second evaluation compared with the first."""
    for word, side in (("first: ", comparison.first), ("second:", comparison.second)):
        say(console, f"{word} {side.folder}: {_model(side.plan)}, {side.prompts} prompts, {_sampling(side.plan)}")
    say(console, f"{comparison.prompts} prompts are in both")
    for caution in comparison.cautions:
        say(console, f"note: {caution}", style="yellow")
    names = ("first", "second", "difference", "std. error", "95 % interval", "p", "better, worse, same")
    table = Table("figure", *[_right(name) for name in names])
    for one in comparison.differences:
        p_value = "–" if one.p_value is None else f"{one.p_value:.2g}"
        table.add_row(
            one.name,
            f"{one.first:.4f}",
            f"{one.second:.4f}",
            *_estimate(one.estimate, sign="+"),
            p_value,
            f"{one.better}, {one.worse}, {one.same}",
        )
    _put(console, table)


def _facts(evaluated: Evaluated) -> list[str]:
    plan, summary = evaluated.plan, evaluated.summary
    facts = [seen_in_training(plan.training_rows, plan.prompts)] if plan.training_rows else []
    if plan.samples > 1 and summary.all_right is not None and summary.all_wrong is not None:
        facts.append(f"prompts all right {summary.all_right:.1%}, all wrong {summary.all_wrong:.1%}")
    if summary.unextracted is not None:
        facts.append(f"no final answer found in {summary.unextracted:.1%} of completions")
    if summary.truncated is not None and summary.max_tokens is not None:
        least, most = summary.max_tokens
        room = f"{most}" if least == most else f"{least} to {most}"
        facts.append(f"cut at max_tokens ({room}) {summary.truncated:.1%}")
    if summary.lengths:
        shown = {0.0: "min", 0.5: "median", 0.9: "90 %", 0.99: "99 %", 1.0: "max"}
        facts.append(
            "tokens a completion: " + ", ".join(f"{word} {summary.lengths[q]:.0f}" for q, word in shown.items())
        )
    facts += _not_asked(summary)
    if len(summary.versions) > 1:
        facts.append("weights changed on the way: " + ", ".join(f"{n} of {v}" for v, n in summary.versions.items()))
    resumed = f", {evaluated.resumed} prompts resumed" if evaluated.resumed else ""
    return [*facts, f"{evaluated.ended - evaluated.started:.1f} s{resumed}; results in {evaluated.folder}"]


def _not_asked(summary: Summary) -> list[str]:
    counts = ", ".join(f"{count} {reason}" for reason, count in summary.skipped.items())
    return [f"not asked: {counts}"] if counts else []


def _model(plan: Plan) -> str:
    return f"model {plan.model}" + (f" (weights {plan.weights})" if plan.weights is not None else "")


def _sampling(plan: Plan) -> str:
    return f"{plan.samples} sample{'s' if plan.samples > 1 else ''} each, {plan.how}"


def _estimate(estimate: Estimate, sign: str = "") -> tuple[str, str, str]:
    stderr = "–" if estimate.stderr is None else f"{estimate.stderr:.4f}"
    return f"{estimate.value:{sign}.4f}", stderr, _interval(estimate, lambda value: f"{value:{sign}.4f}")


def _interval(estimate: Estimate, figure: Callable[[float], str]) -> str:
    if estimate.low is None or estimate.high is None:
        return "–"
    return f"{figure(estimate.low)} to {figure(estimate.high)}"


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"


def _reward(values: Values) -> list[str]:
    estimate = mean(values.means)
    cells = ("–", "–") if estimate is None else _estimate(estimate)[:2]
    ends = [f"{value:.4g}" if values.count else "–" for value in (values.low, values.high)]
    errors = f"[red]{values.errors}[/red]" if values.errors else "0"
    return [*cells, *ends, str(values.count), str(values.skipped), errors]


def _right(name: str) -> Column:
    return Column(name, justify="right")


def _put(console: Console, table: Table) -> None:
    # A file or a pipe has no width, and a truncated table would be useless there.
    (console if console.is_terminal else Console(file=console.file, width=_WIDE)).print(table)
