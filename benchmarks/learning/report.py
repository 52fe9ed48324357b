"""Curves as a table, as JSON and as a plot."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning.runs import Curve

WINDOW = 5
"""Number of steps over which the reward is averaged before it is compared with the target, because the reward of a
single batch is noisy."""


def steps_to(curve: Curve, target: float) -> int | None:
    """Returns the first step (from 1) at which the mean reward of the last `WINDOW` steps is `target` or more.

    Returns None if no step reaches the target.
    """
    for step in range(WINDOW, len(curve.rewards) + 1):
        if statistics.fmean(curve.rewards[step - WINDOW : step]) >= target:
            return step
    return None


def first(curve: Curve) -> float:
    """Returns the mean reward of the first `WINDOW` steps."""
    return statistics.fmean(curve.rewards[:WINDOW])


def last(curve: Curve) -> float:
    """Returns the mean reward of the last `WINDOW` steps."""
    return statistics.fmean(curve.rewards[-WINDOW:])


def table(curves: Sequence[Curve], what: str, target: float | None) -> Iterator[str]:
    """Yields a Markdown table with one row per label. A cell shows the figures of several seeds next to each other.

    `what`: the heading of the labels' column.
    """
    counted = [] if target is None else [f"steps to {target:g}", "their median"]
    heads = [what, *counted, f"first {WINDOW} steps", f"last {WINDOW} steps", "age", "s a run", "s a step"]
    yield f"| {' | '.join(heads)} |"
    yield "|-" * len(heads) + "|"
    for label, ones in _by_label(curves).items():
        cells = [label]
        if target is not None:
            steps = [steps_to(one, target) for one in ones]
            # A run that never reached the target counts as longer than any run that did.
            middle = statistics.median(math.inf if step is None else step for step in steps)
            cells += [" / ".join(_step(step) for step in steps), _step(None if middle == math.inf else middle)]
        cells += [" / ".join(f"{reward(one):.3f}" for one in ones) for reward in (first, last)]
        cells += [f"{statistics.fmean(age for one in ones for age in one.staleness):.2f}"]
        cells += [f"{statistics.median(one.seconds for one in ones):.0f}"]
        cells += [f"{statistics.median(one.stepping / (len(one.rewards) - 1) for one in ones):.2f}"]
        yield f"| {' | '.join(cells)} |"
    yield ""
    if target is not None:
        yield f"A run is at {target:g} with the first step at which the mean of it and the {WINDOW - 1} before it is."
    yield "Age: how many steps old the weights of a trained group were, on average. Seconds: medians."


def _step(step: float | None) -> str:
    return "never" if step is None else f"{step:g}"


def plot(curves: Sequence[Curve], title: str, target: float | None, path: Path) -> None:
    """Writes an SVG with one line per label: the mean of the label's seeds over `WINDOW` steps.

    A band around the line shows the lowest and the highest seed.
    """
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "gristmill"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for label, ones in _by_label(curves).items():
        smooth = [_smooth(one.rewards) for one in ones]
        columns = list(zip(*smooth, strict=True))
        steps = range(WINDOW, WINDOW + len(columns))
        (line,) = axes.plot(steps, [statistics.fmean(column) for column in columns], label=label, linewidth=1.6)
        low, high = [min(column) for column in columns], [max(column) for column in columns]
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
    if target is not None:
        axes.axhline(target, color="grey", linestyle=":", linewidth=1)
    axes.set(xlabel="step", ylabel=f"reward, mean of {WINDOW} steps", title=title)
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def plain(facts: Mapping[str, str], curves: Sequence[Curve]) -> str:
    """Returns all curves, step by step, as JSON."""
    rounded: list[dict[str, Any]] = []
    for curve in curves:
        row = dataclasses.asdict(curve)
        row["rewards"] = [round(reward, 4) for reward in curve.rewards]
        row["staleness"] = [round(age, 3) for age in curve.staleness]
        rounded.append(row)
    return json.dumps({"facts": facts, "curves": rounded})


def _smooth(values: Sequence[float]) -> list[float]:
    return [statistics.fmean(values[end - WINDOW : end]) for end in range(WINDOW, len(values) + 1)]


def _by_label(curves: Sequence[Curve]) -> dict[str, list[Curve]]:
    found: dict[str, list[Curve]] = {}
    for curve in curves:
        found.setdefault(curve.label, []).append(curve)
    return found
