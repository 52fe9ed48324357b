"""All measurements, and their comparison with the targets."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.trajectory.memory import Push, Stored
from benchmarks.trajectory.queue_length import Cost
from benchmarks.trajectory.rounds import Samples, Spread
from benchmarks.trajectory.speed import COMPATIBLE, FLOOR, GZIPPED, NATIVE, REFERENCE

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
    for shape, doors in results.speed.items():
        reference = doors[REFERENCE]
        for door, submit, draw in ((NATIVE, 6, 100), (COMPATIBLE, 2.5, 30)):
            if door not in doors:
                continue
            faster = middle(doors[door].submits) / middle(reference.submits)
            yield Target(f"{door} submit, {shape}", faster, submit, " × the reference's groups/s", True)
            faster = middle(reference.draws) / middle(doors[door].draws)
            yield Target(f"{door} batch draw, {shape}", faster, draw, " × the reference's speed", True)
        if COMPATIBLE + GZIPPED in doors:
            gzipped, theirs = doors[COMPATIBLE + GZIPPED], doors[REFERENCE + GZIPPED]
            faster = middle(gzipped.submits) / middle(theirs.submits)
            yield Target(f"compatible submit, gzip, {shape}", faster, 2.5, " × the reference's groups/s", True)
            faster = middle(theirs.draws) / middle(gzipped.draws)
            yield Target(f"compatible batch draw, gzip, {shape}", faster, 30, " × the reference's speed", True)
    for call in dict.fromkeys(cost.call for cost in results.costs):
        counts = {cost.commands for cost in results.costs if cost.call == call}
        yield Target(f"{call}: different counts of Redis commands", len(counts), 1, "", False)
    for push in results.pushes:
        through = f"{push.pushed / 1e9:.1f} GB"
        yield Target(f"API's peak memory, {through} pushed, {push.door}", push.peak / MB, 250, " MB", False)
    for stored in results.stored:
        yield Target(f"Redis memory, {stored.shape.name}", stored.ratio, 1.3, " × the stored bytes", False)


def to_floor(doors: Mapping[str, Samples]) -> tuple[float, float]:
    """Returns how many times faster Redis alone is than the native interface with the same bytes: (submit, draw)."""
    native, floor = doors[NATIVE], doors[FLOOR]
    return middle(floor.submits) / middle(native.submits), middle(native.draws) / middle(floor.draws)
