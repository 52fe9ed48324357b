"""Submits and draws with all interfaces in turn, round after round, so that a slow minute slows all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.trajectory.clients import Http, UnexpectedAnswer, load
from benchmarks.trajectory.doors import BATCH_GROUPS, Door
from benchmarks.trajectory.payloads import Payload
from benchmarks.trajectory.processes import cpu_seconds


@dataclass(frozen=True)
class Plan:
    """The work of one round with an interface. Slow interfaces get less work, so that rounds stay short."""

    groups: int
    draws: int


@dataclass
class Samples:
    """The measurements of one interface over all rounds."""

    submits: list[float] = field(default_factory=list)
    """Groups per second of each round."""
    submit_latencies: list[float] = field(default_factory=list)
    """Seconds of each request."""
    submit_cpu: list[float] = field(default_factory=list)
    """Processor seconds per group in each round: of the server, and of Redis if the server uses Redis."""
    draws: list[float] = field(default_factory=list)
    """Seconds of each batch."""
    settles: list[float] = field(default_factory=list)
    """Seconds of each ack, if the protocol has acks."""


@dataclass(frozen=True)
class Spread:
    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(min(values), statistics.median(values), max(values))


def measure(door: Door, pids: Sequence[int], plan: Plan, payloads: Sequence[Payload], samples: Samples) -> None:
    """Measures one round of one interface. `pids`: the processes that serve the interface."""
    requests = door.prepare(payloads, plan.groups)
    before = cpu_seconds(*pids)
    done = load(door.port, requests)
    samples.submit_cpu.append((cpu_seconds(*pids) - before) / plan.groups)
    samples.submits.append(plan.groups / done.seconds)
    samples.submit_latencies += done.latencies
    http = Http(door.port)
    for _ in range(plan.draws):
        before = time.monotonic()
        answer = door.draw(http)
        drawn = time.monotonic()
        door.settle(http)
        samples.draws.append(drawn - before)
        samples.settles.append(time.monotonic() - drawn)
    if not door.holds(answer, payloads):
        raise UnexpectedAnswer(f"{door.name}: its last batch is not {BATCH_GROUPS} groups as they were submitted")
    http.close()


def interleave(
    work: Mapping[str, Callable[[Samples], None]], rounds: int, say: Callable[[str], None]
) -> dict[str, Samples]:
    """Runs all works in turn for `rounds` rounds. A different work comes first in each round."""
    found = {name: Samples() for name in work}
    names = list(work)
    for index in range(rounds):
        for offset in range(len(names)):
            name = names[(index + offset) % len(names)]
            samples = found[name]
            work[name](samples)
            say(
                f"round {index + 1}/{rounds}, {name}: "
                f"{samples.submits[-1]:.1f} groups/s, {samples.draws[-1] * 1000:.1f} ms a batch"
            )
    return found
