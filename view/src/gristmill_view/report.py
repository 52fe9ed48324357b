"""Reports: HTML files that need nothing else, in the look of the page.

`write_report` writes the report of a run. `Reports` renders the templates of any package: the environment's `process`
and `evaluate` use it.

A model's text is untrusted. Jinja escapes every value, invisible characters become their code points, and as a second
defence a report's content security policy allows only the report's own script and style, by their hashes.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, TypeVar

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from gristmill.internal.disk import complete_file
from gristmill.internal.redaction import redact
from gristmill_view.run_source import RunSource
from gristmill_view.samples import question
from gristmill_view.source import Overview, ViewError

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Control characters, characters that change the reading direction, and characters without a shape."""
_SAMPLED_STEPS: Final = 6
_POINTS: Final = 200
_LONG: Final = 4000


def visible(text: str) -> str:
    """Returns `text` with invisible characters as their code points, such as [U+202E]."""
    return _UNSEEN.sub(lambda found: f"[U+{ord(found[0]):04X}]", text)


def figure(value: float | None) -> str:
    """Returns three significant digits; a dash for None."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.3g}"


class Reports:
    """Renders templates of a package, which may extend `base.html`."""

    def __init__(self, *packages: str) -> None:
        """`packages`: packages with a folder `templates`, searched in order before this one's."""
        self._environment = Environment(
            loader=ChoiceLoader([PackageLoader(name) for name in (*packages, "gristmill_view")]),
            autoescape=True,
            undefined=StrictUndefined,
            finalize=_finalized,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters |= {"figure": figure}
        self._style = (files("gristmill_view") / "templates" / "report.css").read_text(encoding="utf-8")

    def render(self, template: str, title: str, script: str = "", **values: Any) -> Iterator[str]:
        """Yields a report in parts, so that a long report need not fit into memory. `script`: our own, trusted."""
        policy = (
            f"default-src 'none'; style-src {_hash(self._style)}; "
            + (f"script-src {_hash(script)}; " if script else "")
            + "base-uri 'none'; form-action 'none'"
        )
        frame = {"policy": policy, "title": title, "style": Markup(self._style), "script": Markup(script)}
        return iter(self._environment.get_template(template).generate(**frame, **values))


def _finalized(value: Any) -> Any:
    if isinstance(value, str) and not isinstance(value, Markup):
        return visible(value)
    return "" if value is None else value


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


# --- Curves ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Line:
    """One line of a curve, as points of an SVG of 100 × 100."""

    name: str
    points: str
    newest: float | None


@dataclass(frozen=True)
class Curve:
    """A figure with lines over steps."""

    title: str
    lines: Sequence[Line]
    low: float
    high: float
    first: int
    last: int
    band: str = ""
    """Points of a polygon around the first line."""
    marks: Sequence[tuple[float, float, float, float]] = ()
    """Evaluations: x, y, and the y of both ends of the interval."""


PANELS: Final = (
    ("Reward", ("reward_mean",)),
    ("Reward by part", ("reward_parts.*",)),
    ("Reward by source", ("source_rewards.*",)),
    ("Completion length", ("completion_tokens_mean",)),
    ("Entropy", ("entropy_mean",)),
    ("Loss", ("loss",)),
    ("Gradient norm", ("grad_norm",)),
    ("Log-probability difference", ("rollout_logprob_diff_mean",)),
    ("Clipped tokens", ("clip_low_share", "clip_high_share")),
    ("Groups without signal", ("zero_advantage_share",)),
    ("Tokens per second of training", ("tokens_per_second",)),
)


def curve(
    title: str,
    steps: Sequence[int],
    columns: Mapping[str, Sequence[float | None]],
    spread: Sequence[float | None] | None = None,
    evaluations: Sequence[Mapping[str, Any]] = (),
) -> Curve | None:
    """Returns the curve of some metrics; None without a number. `spread`: half the height of a band."""
    ends: list[float] = [value for column in columns.values() for value in column if value is not None]
    band = []
    if spread is not None:
        (column,) = columns.values()
        band = [
            (step, value - around, value + around)
            for step, value, around in zip(steps, column, spread, strict=True)
            if value is not None and around is not None
        ]
        ends += [end for _, low, high in band for end in (low, high)]
    ends += [end for point in evaluations for end in (point["score"], point["low"], point["high"]) if end is not None]
    if not ends:
        return None
    low, high = min(ends), max(ends)
    first, last = min([steps[0], *(int(point["step"]) for point in evaluations)]), steps[-1]

    def x(step: float) -> float:
        return 100 * (step - first) / max(last - first, 1)

    def y(value: float) -> float:
        return 100 - 100 * (value - low) / ((high - low) or 1)

    def joined(points: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{x(step):.2f},{y(value):.2f}" for step, value in points)

    lines = []
    for name, column in columns.items():
        points = [(step, value) for step, value in zip(steps, column, strict=True) if value is not None]
        lines.append(Line(name, joined(points), points[-1][1] if points else None))
    around = [(step, edge) for step, _, edge in band] + [(step, edge) for step, edge, _ in reversed(band)]
    marks = [
        (x(one["step"]), y(one["score"]), y(_or(one["low"], one["score"])), y(_or(one["high"], one["score"])))
        for one in evaluations
    ]
    return Curve(title, lines, low, high, first, last, joined(around), marks)


def _or(value: float | None, instead: float) -> float:
    return instead if value is None else value


# --- The report of a run ---------------------------------------------------------------------------------------
async def write_report(source: RunSource, run: str, path: Path) -> None:
    """Writes the report of a run to `path`, completely or not at all. Raises ViewError and OSError.

    Long values are cut, so the file has about a megabyte at most, however long the run is.
    """
    overview = await source.overview(run)
    overview["evaluations"] = _evenly(overview["evaluations"], _POINTS)
    names = sorted({name for _, panel in PANELS for name in panel} | {"reward_std"})
    curves = await source.series(run, names, _POINTS)
    rewards = [value for value in curves["series"].get("reward_mean", {"mean": []})["mean"] if value is not None]
    settings = {name: value for name, value in redact(overview["settings"]).items() if value is not None}
    values: dict[str, Any] = {
        "overview": overview,
        "facts": _facts(overview, rewards),
        "curves": list(_curves(curves["step"], curves["series"], overview["evaluations"])),
        "samples": await _samples(source, run, curves["step"]),
        "settings": {name: str(value)[:_LONG] for name, value in settings.items()},
        "written": f"{datetime.now(UTC):%-d %B %Y, %H:%M} UTC",
    }
    await asyncio.to_thread(_write, path, run, values)


def _write(path: Path, run: str, values: Mapping[str, Any]) -> None:
    with complete_file(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(Reports().render("run.html", f"Run {run}", **values))


def _facts(overview: Overview, rewards: Sequence[float]) -> list[tuple[str, str, str]]:
    steps, queue = overview["steps"], overview["queue"]
    facts = [("state", overview["state"], f"step {overview['step']}" + (f" of {steps}" if steps else ""))]
    if rewards:
        facts.append(("reward", figure(rewards[-1]), f"from {figure(rewards[0])} in the first step"))
    points = overview["evaluations"]
    if points:
        last = points[-1]
        facts.append(
            (
                "held-out score",
                f"{100 * last['score']:.3g} %",
                f"from {100 * points[0]['score']:.3g} %; {last['n']} prompts",
            )
        )
    speed = overview["tokens_per_second"]
    if speed is not None:
        facts.append(("speed", figure(speed), "tokens per second, last ten steps"))
    facts.append(("groups", str(queue.get("trained", 0)), f"trained; {queue.get('dropped', 0)} dropped"))
    return facts


def _curves(
    steps: Sequence[int], series: Mapping[str, Any], evaluations: Sequence[Mapping[str, Any]]
) -> Iterator[Curve]:
    if not steps:
        return
    for title, patterns in PANELS:
        columns = {
            name.removeprefix(pattern.removesuffix("*")) if pattern.endswith(".*") else name: band["mean"]
            for pattern in patterns
            for name, band in series.items()
            if name == pattern or (pattern.endswith(".*") and name.startswith(pattern[:-1]))
        }
        reward = title == "Reward" and bool(columns)
        spread = series["reward_std"]["mean"] if reward and "reward_std" in series else None
        chart = curve(title, steps, columns, spread, evaluations if reward else ())
        if chart is not None:
            yield chart


async def _samples(source: RunSource, run: str, steps: Sequence[int]) -> list[dict[str, Any]]:
    """Returns the best and the worst completion of some steps, from the first to the last."""
    try:
        samples = await source.highlights(run, _evenly(steps, _SAMPLED_STEPS))
    except ViewError as error:  # the rest of the report needs no completions
        _LOG.warning("the report of run %s has no samples: %s", run, error)
        return []
    return [{"step": one["step"], "rows": [_cut(row) for row in one["rows"]]} for one in samples]


def _cut(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the row with bounded texts and the question as its prompt. `rest`: the number of characters cut off."""
    row = {**row, "prompt": row["prompt"] and question(row["prompt"])}
    names = [name for name in ("prompt", "completion", "answer", "extracted") if name in row]
    texts: dict[str, Any] = {name: row[name] and str(row[name])[:_LONG] for name in names}
    return {**row, **texts, "rest": max(0, len(row["completion"]) - _LONG)}


def _evenly(values: Sequence[T], most: int) -> list[T]:
    """Returns at most `most` of the values, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    return [values[round(at * (len(values) - 1) / (most - 1))] for at in range(most)]
