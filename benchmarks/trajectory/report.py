"""Writes the results as a page of Markdown. The terminal shows the same text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from benchmarks.trajectory.clients import CLIENTS
from benchmarks.trajectory.doors import BATCH_GROUPS
from benchmarks.trajectory.results import MB, Results, middle, targets, to_floor
from benchmarks.trajectory.rounds import Samples, Spread
from benchmarks.trajectory.speed import GZIPPED, REFERENCE


def page(results: Results) -> str:
    return "\n".join(_lines(results)) + "\n"


def _lines(results: Results) -> Iterator[str]:
    yield "# Trajectory API: measured"
    yield ""
    yield from _table(("", ""), results.facts.items())
    goals = list(targets(results))
    missed = sum(not goal.met for goal in goals)
    yield ""
    yield f"## Numbers to reach: {len(goals) - missed} met, {missed} missed"
    yield ""
    yield from _table(
        ("what", "found", "wanted", ""),
        (
            (
                goal.what,
                f"{goal.found:.3g}{goal.unit}",
                f"{'≥' if goal.at_least else '≤'} {goal.wanted:g}",
                "met" if goal.met else "**missed**",
            )
            for goal in goals
        ),
    )
    for shape, doors in results.speed.items():
        yield ""
        yield f"## Groups of {shape} tokens"
        yield ""
        sizes = ", ".join(f"{name} {size:,} B" for name, size in results.sizes[shape].items())
        yield f"A group: {sizes}. {CLIENTS} clients submit; one client draws batches of {BATCH_GROUPS} groups."
        yield "min / median / max over all rounds; × is the ratio of medians to the reference with the same encoding."
        yield ""
        yield from _table(
            ("", "submit, groups/s", "×", "p50 / p99 ms", "server CPU ms a group", "draw, ms", "×", "ack, ms"),
            (_speed_row(name, samples, doors) for name, samples in doors.items()),
        )
        submit, draw = to_floor(doors)
        yield ""
        yield f"Distance to the floor (Redis alone): submit {submit:.1f} ×, draw {draw:.1f} ×."
    if results.costs:
        yield ""
        yield "## Cost by the queue's length"
        yield ""
        yield from _table(
            ("call", "groups ready", "Redis commands", "ms: min / median / max"),
            (
                (cost.call, f"{cost.ready:,}", str(cost.commands), _spread(cost.latencies, 1000, 2))
                for cost in results.costs
            ),
        )
    if results.pushes or results.stored:
        yield ""
        yield "## Memory"
        yield ""
    for push in results.pushes:
        steps = ", ".join(f"{size / MB:.0f}" for size in push.resident)
        yield (
            f"- {push.pushed / 1e9:.2f} GB through the API's {push.door} door in {push.seconds:.0f} s "
            f"({push.pushed / push.seconds / MB:.0f} MB/s): idle {push.idle / MB:.0f} MB, then each tenth {steps} MB; "
            f"peak {push.peak / MB:.0f} MB. Redis' peak: {push.redis_peak / MB:.0f} MB. "
            f"{push.refused} submits were answered with a request to retry."
        )
    for stored in results.stored:
        yield (
            f"- {stored.groups} groups of {stored.shape.name} stored, {stored.payload_bytes / MB:.0f} MB of payloads: "
            f"Redis holds {stored.redis_bytes / MB:.0f} MB more than empty, {stored.ratio:.2f} ×."
        )


def _speed_row(name: str, samples: Samples, doors: dict[str, Samples]) -> Sequence[str]:
    theirs = doors[REFERENCE + GZIPPED if name.endswith(GZIPPED) else REFERENCE]
    settles = any(second > 1e-4 for second in samples.settles)
    return (
        name,
        _spread(samples.submits, 1, 1),
        f"{middle(samples.submits) / middle(theirs.submits):.2f}",
        f"{_percentile(samples.submit_latencies, 50)} / {_percentile(samples.submit_latencies, 99)}",
        f"{middle(samples.submit_cpu) * 1000:.2f}" if samples.submit_cpu else "",
        _spread(samples.draws, 1000, 2),
        f"{middle(theirs.draws) / middle(samples.draws):.1f}",
        f"{middle(samples.settles) * 1000:.2f}" if settles else "",
    )


def _spread(values: Sequence[float], scale: float, digits: int) -> str:
    found = Spread.of(values)
    return " / ".join(f"{value * scale:,.{digits}f}" for value in (found.low, found.middle, found.high))


def _percentile(seconds: Sequence[float], percent: int) -> str:
    if not seconds:
        return "-"
    return f"{sorted(seconds)[min(len(seconds) - 1, len(seconds) * percent // 100)] * 1000:.1f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yields a Markdown table with aligned columns, so that it is readable in a terminal and in a browser."""
    cells = [list(head), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    for index, row in enumerate(cells):
        yield "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        if index == 0:
            yield "|" + "|".join("-" * (width + 2) for width in widths) + "|"
