"""The work and the waits of a step: the phases of the trainer, and the groups that each environment had in work.

The trainer's row has the time of the step's end and the seconds of its phases. A group has the time of its submit, and
the seconds since its first request. Model servers record no times: they work while an environment has groups in work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gristmill.internal.metrics import number
from gristmill_view.source import Lane, Span, Timeline, ViewError

_PHASES: Final = ("checkpoint", "publish", "wait", "pack", "train")
"""In their order. `checkpoint` and `publish` are of the step before."""
_WAIT: Final = "wait"
_MOST_ROWS: Final = 24
"""Rows of an environment's groups in the drawing."""
_LONGEST_S: Final = 1e9
MOST_GROUPS: Final = 1000


@dataclass(frozen=True)
class Work:
    """The work of an environment on one group, in Unix seconds."""

    group_id: str
    env_id: str
    start: float
    end: float


@dataclass(frozen=True)
class Window:
    """The time of a step, in Unix seconds, with the trainer's phases."""

    start: float
    end: float
    phases: Sequence[tuple[str, float]]
    """Phases in their order, with their seconds. The last one ends with the step."""


def window(rows: Sequence[Mapping[str, Any]], step: int) -> Window:
    """Returns the time of a step. `rows`: the trainer's metrics, nested. Raises ViewError for a step without times."""
    row = next((row for row in rows if row["step"] == step), {})
    end = number(row.get("finished_at"))
    spent = {name: value for name, value in row.get("seconds", {}).items() if (number(value) or 0) > 0}
    total = sum(map(float, spent.values()))
    if end is None or not 0 < total < _LONGEST_S:
        raise ViewError(
            "timeline_missing", f"Step {step} has no time of its end.", remedy="A step of a newer trainer has one."
        )
    order = [*_PHASES[:-1], *(name for name in spent if name not in _PHASES), _PHASES[-1]]
    phases = [(name, float(spent[name])) for name in order if name in spent]
    before = number(next((row for row in rows if row["step"] == step - 1), {}).get("finished_at"))
    # The loop does little besides its phases. A longer gap is a pause: another trainer took the step before.
    start = before if before is not None and total <= end - before <= 2 * total else end - total
    return Window(start, end, phases)


def timeline(times: Window, works: Sequence[Work]) -> Timeline:
    """Returns the timeline of a step. `works`: the groups in work in its time, at most MOST_GROUPS and one more."""
    length = times.end - times.start
    newest_works = works[:MOST_GROUPS]
    lanes = [_trainer(times)]
    for env_id in sorted({work.env_id for work in newest_works}):
        parts = sorted(
            (max(0.0, work.start - times.start), min(length, work.end - times.start), work.group_id)
            for work in newest_works
            if work.env_id == env_id
        )
        lanes.append(_environment(env_id, [part for part in parts if part[0] <= part[1]], length))
    return {
        "start_ms": round(times.start * 1000),
        "seconds": length,
        "lanes": lanes,
        "complete": len(works) <= MOST_GROUPS,
    }


def _trainer(times: Window) -> Lane:
    spans: list[Span] = []
    end = times.end - times.start
    for name, seconds in reversed(times.phases):
        spans.insert(0, {"start": max(0.0, end - seconds), "end": end, "what": name})
        end = max(0.0, end - seconds)
    waited = sum(seconds for name, seconds in times.phases if name == _WAIT)
    return {"name": "trainer", "waited": waited, "spans": spans, "groups": []}


def _environment(name: str, parts: Sequence[tuple[float, float, str]], length: float) -> Lane:
    """Returns the `Lane` of an environment. `parts`: (start, end, group) by start."""
    spans: list[Span] = []
    at = waited = 0.0
    for start, end, _ in parts:
        if start > at or not spans:
            if start > at:
                spans.append({"start": at, "end": start, "what": _WAIT})
                waited += start - at
            spans.append({"start": start, "end": end, "what": "work"})
        spans[-1]["end"] = at = max(spans[-1]["end"], end)
    if at < length:
        spans.append({"start": at, "end": length, "what": _WAIT})
        waited += length - at
    ends: list[float] = []
    groups: list[Span] = []
    for start, end, group_id in parts:
        row = next((row for row, free in enumerate(ends) if free <= start), len(ends))
        if row == _MOST_ROWS:
            continue
        ends[row:] = [end, *ends[row + 1 :]]
        groups.append({"start": start, "end": end, "what": group_id, "row": row})
    return {"name": name, "waited": waited, "spans": spans, "groups": groups}
