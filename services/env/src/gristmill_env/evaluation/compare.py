"""Compares two evaluations of the same prompts: the difference, and the probability that it is chance.

The difference is taken per prompt, so that each prompt's difficulty cancels. A paired comparison needs far fewer
prompts than a comparison of two separate intervals (Miller, arXiv:2411.00640).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gristmill.internal.saved import SavedCompletion, SavedGroup
from gristmill_env.errors import EvaluationError
from gristmill_env.evaluation.estimators import Estimate, mean, pass_at_k, pass_ks
from gristmill_env.evaluation.folder import read_evaluation, read_plan
from gristmill_env.evaluation.plan import Plan


@dataclass(frozen=True)
class Difference:
    """One figure in both evaluations, over the prompts that have it in both."""

    name: str
    first: float
    second: float
    estimate: Estimate
    """Mean over prompts of second − first, with its clustered standard error and 95 % interval."""
    p_value: float | None
    """Two-sided, for no difference, by the normal distribution. None for one prompt, or if all differ by the same."""
    better: int
    worse: int
    same: int
    """Prompts by the sign of their difference."""


@dataclass(frozen=True)
class Side:
    """One of the two evaluations."""

    folder: Path
    plan: Plan
    prompts: int


@dataclass(frozen=True)
class Comparison:
    """The second evaluation compared with the first."""

    first: Side
    second: Side
    prompts: int
    """Number of prompts in both evaluations."""
    cautions: list[str]
    """Other differences between the two evaluations."""
    differences: list[Difference]


def compare(first: Path, second: Path) -> Comparison:
    """Compares the evaluations in two folders. Raises EvaluationError when they share no prompts."""
    sides = [(read_plan(folder), _answered(folder)) for folder in (first, second)]
    (plan_a, a), (plan_b, b) = sides
    rows = sorted(a.keys() & b.keys())
    if not rows:
        raise EvaluationError(
            "no_common_rows",
            f"the evaluations in {first} and {second} have no row in common",
            first=first,
            second=second,
        )
    for row in rows:
        if a[row].answer != b[row].answer:
            raise EvaluationError(
                "answers_differ",
                f"row {row} has the answer {a[row].answer!r:.40} in {first}, but {b[row].answer!r:.40} in {second}: "
                "they are not of the same data set",
                row=row,
                first=first,
                second=second,
            )
    pairs = [(a[row], b[row]) for row in rows]
    return Comparison(
        Side(first, plan_a, len(a)),
        Side(second, plan_b, len(b)),
        len(rows),
        _cautions(plan_a, plan_b, pairs),
        [found for name, value in _figures(plan_a, plan_b, pairs).items() if (found := difference(name, pairs, value))],
    )


Value = Callable[[SavedGroup], float | None]


def difference(name: str, pairs: Sequence[tuple[SavedGroup, SavedGroup]], value: Value) -> Difference | None:
    """Returns the paired difference of a per-prompt figure; None when no pair has the figure on both sides."""
    known = [(x, y) for one, other in pairs if (x := value(one)) is not None and (y := value(other)) is not None]
    deltas = [y - x for x, y in known]
    estimate = mean(deltas)
    if estimate is None:
        return None
    # Equal differences may differ by rounding, as 2/3 - 1/3 and 1 - 2/3 do.
    error = estimate.stderr if (estimate.stderr or 0.0) > 1e-12 * max(1.0, abs(estimate.value)) else None
    p_value = None if error is None else math.erfc(abs(estimate.value) / error / math.sqrt(2))
    return Difference(
        name,
        math.fsum(x for x, _ in known) / len(known),
        math.fsum(y for _, y in known) / len(known),
        estimate,
        p_value,
        better=sum(delta > 0 for delta in deltas),
        worse=sum(delta < 0 for delta in deltas),
        same=sum(delta == 0 for delta in deltas),
    )


def _answered(folder: Path) -> dict[int, SavedGroup]:
    return {group.row: group for group in read_evaluation(folder) if group.row is not None and group.completions}


def _figures(a: Plan, b: Plan, pairs: Sequence[tuple[SavedGroup, SavedGroup]]) -> dict[str, Value]:
    figures: dict[str, Value] = {"right": _right}
    figures |= {f"pass@{k}": _passes(k) for k in pass_ks(min(a.samples, b.samples)) if k > 1}
    one, other = (side.completions[0].scores for side in pairs[0])
    figures |= {name: _mean_of(_part(name)) for name in one if name in other}
    return {**figures, "total": _mean_of(lambda one: one.total)}


def _right(group: SavedGroup) -> float | None:
    judged = [one.right for one in group.completions if one.right is not None]
    return sum(judged) / len(judged) if judged else None


def _passes(k: int) -> Value:
    def value(group: SavedGroup) -> float | None:
        judged = [one.right for one in group.completions if one.right is not None]
        return pass_at_k(len(judged), sum(judged), k) if len(judged) >= k else None

    return value


def _part(name: str) -> Callable[[SavedCompletion], float | None]:
    return lambda one: one.scores.get(name)


def _mean_of(part: Callable[[SavedCompletion], float | None]) -> Value:
    def value(group: SavedGroup) -> float | None:
        known = [found for one in group.completions if (found := part(one)) is not None]
        return math.fsum(known) / len(known) if known else None

    return value


def _cautions(a: Plan, b: Plan, pairs: Sequence[tuple[SavedGroup, SavedGroup]]) -> list[str]:
    differences = []
    if a.dataset != b.dataset:
        differences.append(f"the data sets are named differently: {a.dataset}; {b.dataset}")
    if other := sum(x.prompt_text != y.prompt_text for x, y in pairs):
        differences.append(f"{other} of {len(pairs)} prompts are not the same, word for word")
    what: Mapping[str, tuple[object, object]] = {
        "samples": (a.samples, b.samples),
        "temperature": (a.sampling.temperature, b.sampling.temperature),
        "top_p": (a.sampling.top_p, b.sampling.top_p),
        "max_tokens": (a.sampling.max_tokens, b.sampling.max_tokens),
        "the deciding reward": (a.decides, b.decides),
    }
    return differences + [
        f"{name} is {x} in the first and {y} in the second" for name, (x, y) in what.items() if x != y
    ]
