"""All measurements, their comparison with the targets, and the page of Markdown that shows them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.api.clients import CLIENTS
from benchmarks.api.interfaces import BATCH_GROUPS
from benchmarks.api.memory import Push, Stored
from benchmarks.api.queue_length import Cost
from benchmarks.api.speed import COMPATIBLE, FLOOR, GZIPPED, NATIVE, REFERENCE, Samples, Spread

MB = 1e6


@dataclass
class Results:
    facts: Mapping[str, str]
    speed: dict[str, dict[str, Samples]] = field(default_factory=dict)
    """Shape's name -> interface's name -> samples."""
    sizes: dict[str, dict[str, int]] = field(default_factory=dict)
    """Shape's name -> encoding -> bytes per group."""
    costs: list[Cost] = field(default_factory=list)
    stored: list[Stored] = field(default_factory=list)
    pushes: list[Push] = field(default_factory=list)

    def json(self) -> str:
        """Returns all results, sample by sample, as JSON."""
        whole: dict[str, Any] = dataclasses.asdict(self)
        whole["targets"] = [dataclasses.asdict(target) | {"met": target.met} for target in targets(self)]
        return json.dumps(whole, indent=1)


@dataclass(frozen=True)
class Target:
    """One number to reach, and the measured number."""

    what: str
    found: float
    wanted: float
    unit: str
    at_least: bool
    """Whether the number must be at least `wanted`. If False, it must be at most `wanted`."""

    @property
    def met(self) -> bool:
        return self.found >= self.wanted if self.at_least else self.found <= self.wanted


def middle(values: Sequence[float]) -> float:
    return Spread.of(values).middle


def targets(results: Results) -> Iterator[Target]:
    """Yields the targets that have measurements."""
    for shape, interfaces in results.speed.items():
        reference = interfaces[REFERENCE]
        for interface, submit, draw in ((NATIVE, 8, 100), (COMPATIBLE, 2.5, 30)):
            if interface not in interfaces:
                continue
            faster = middle(interfaces[interface].submits) / middle(reference.submits)
            yield Target(f"{interface} submit, {shape}", faster, submit, " × the reference's groups/s", True)
            faster = middle(reference.draws) / middle(interfaces[interface].draws)
            yield Target(f"{interface} batch draw, {shape}", faster, draw, " × the reference's speed", True)
        if COMPATIBLE + GZIPPED in interfaces:
            gzipped, theirs = interfaces[COMPATIBLE + GZIPPED], interfaces[REFERENCE + GZIPPED]
            faster = middle(gzipped.submits) / middle(theirs.submits)
            yield Target(f"compatible submit, gzip, {shape}", faster, 2.5, " × the reference's groups/s", True)
            faster = middle(theirs.draws) / middle(gzipped.draws)
            yield Target(f"compatible batch draw, gzip, {shape}", faster, 30, " × the reference's speed", True)
    for call in dict.fromkeys(cost.call for cost in results.costs):
        counts = {cost.commands for cost in results.costs if cost.call == call}
        yield Target(f"{call}: different counts of Redis commands", len(counts), 1, "", False)
    for push in results.pushes:
        through = f"{push.pushed / 1e9:.1f} GB"
        yield Target(f"API's peak memory, {through} pushed, {push.interface}", push.peak / MB, 250, " MB", False)
    for stored in results.stored:
        yield Target(f"Redis memory, {stored.shape.name}", stored.ratio, 1.3, " × the stored bytes", False)


def to_floor(interfaces: Mapping[str, Samples]) -> tuple[float, float]:
    """Returns how many times faster Redis alone is than the native interface with the same bytes: (submit, draw)."""
    native, floor = interfaces[NATIVE], interfaces[FLOOR]
    return middle(floor.submits) / middle(native.submits), middle(native.draws) / middle(floor.draws)


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
    for shape, interfaces in results.speed.items():
        yield ""
        yield f"## Groups of {shape} tokens"
        yield ""
        sizes = ", ".join(f"{name} {size:,} B" for name, size in results.sizes[shape].items())
        yield f"A group: {sizes}. {CLIENTS} clients submit; one client draws batches of {BATCH_GROUPS} groups."
        yield "min / median / max over all rounds; × is the ratio of medians to the reference with the same encoding."
        yield ""
        yield from _table(
            ("", "submit, groups/s", "×", "p50 / p99 ms", "server CPU ms a group", "draw, ms", "×", "ack, ms"),
            (_speed_row(name, samples, interfaces) for name, samples in interfaces.items()),
        )
        submit, draw = to_floor(interfaces)
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
            f"- {push.pushed / 1e9:.2f} GB through the API's {push.interface} interface in {push.seconds:.0f} s "
            f"({push.pushed / push.seconds / MB:.0f} MB/s): idle {push.idle / MB:.0f} MB, then each tenth {steps} MB; "
            f"peak {push.peak / MB:.0f} MB. Redis' peak: {push.redis_peak / MB:.0f} MB. "
            f"{push.refused} submits were answered with a request to retry."
        )
    for stored in results.stored:
        yield (
            f"- {stored.groups} groups of {stored.shape.name} stored, {stored.payload_bytes / MB:.0f} MB of payloads: "
            f"Redis holds {stored.redis_bytes / MB:.0f} MB more than empty, {stored.ratio:.2f} ×."
        )


def _speed_row(name: str, samples: Samples, interfaces: dict[str, Samples]) -> Sequence[str]:
    theirs = interfaces[REFERENCE + GZIPPED if name.endswith(GZIPPED) else REFERENCE]
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
