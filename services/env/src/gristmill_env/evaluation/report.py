"""Evaluations and comparisons as tables to read."""

from __future__ import annotations

from rich.console import Console
from rich.table import Column, Table

from gristmill_env.console import say
from gristmill_env.evaluation.compare import Comparison
from gristmill_env.evaluation.estimators import Estimate
from gristmill_env.evaluation.plan import Plan, seen_in_training
from gristmill_env.evaluation.results import Evaluated, RewardFigures

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
    for name, estimate in summary.estimates(plan.samples).items():
        table.add_row(name, *_estimate(estimate), str(estimate.prompts))
    _put(console, table)
    names = ("mean", "std. error", "min", "max", "scored", "skipped", "errors")
    rewards = Table("reward", *[_right(name) for name in names])
    for name, one in {**summary.rewards, "total": summary.total}.items():
        rewards.add_row(name, *_reward(one))
    _put(console, rewards)
    for text in _facts(evaluated):
        say(console, text)


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
    if summary.skipped:
        facts.append("not asked: " + ", ".join(f"{count} {reason}" for reason, count in summary.skipped.items()))
    if len(summary.versions) > 1:
        facts.append("weights changed on the way: " + ", ".join(f"{n} of {v}" for v, n in summary.versions.items()))
    resumed = f", {evaluated.resumed} prompts resumed" if evaluated.resumed else ""
    return [*facts, f"{evaluated.ended - evaluated.started:.1f} s{resumed}; results in {evaluated.folder}"]


def _model(plan: Plan) -> str:
    return f"model {plan.model}" + (f" (weights {plan.weights})" if plan.weights is not None else "")


def _sampling(plan: Plan) -> str:
    return f"{plan.samples} sample{'s' if plan.samples > 1 else ''} each, {plan.how}"


def _estimate(estimate: Estimate, sign: str = "") -> tuple[str, str, str]:
    stderr = "–" if estimate.stderr is None else f"{estimate.stderr:.4f}"
    interval = "–"
    if estimate.low is not None and estimate.high is not None:
        interval = f"{estimate.low:{sign}.4f} to {estimate.high:{sign}.4f}"
    return f"{estimate.value:{sign}.4f}", stderr, interval


def _reward(figures: RewardFigures) -> list[str]:
    cells = ("–", "–") if figures.mean is None else _estimate(figures.mean)[:2]
    ends = ["–" if value is None else f"{value:.4g}" for value in (figures.low, figures.high)]
    errors = f"[red]{figures.errors}[/red]" if figures.errors else "0"
    return [*cells, *ends, str(figures.scored), str(figures.skipped), errors]


def _right(name: str) -> Column:
    return Column(name, justify="right")


def _put(console: Console, table: Table) -> None:
    # A file or a pipe has no width, and a truncated table would be useless there.
    (console if console.is_terminal else Console(file=console.file, width=_WIDE)).print(table)
