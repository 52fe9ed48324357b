"""Submit and draw: all doors in turn, round after round, so that a slow minute slows them all."""

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
    """How much one round asks of a door. Slow doors get fewer, so that rounds stay short."""

    groups: int
    draws: int


@dataclass
class Samples:
    """What one door did, over all rounds."""

    submits: list[float] = field(default_factory=list)
    """Groups a second, one a round."""
    submit_latencies: list[float] = field(default_factory=list)
    """Seconds a request, all of them."""
    submit_cpu: list[float] = field(default_factory=list)
    """Processor seconds of the server, and of Redis where it has one, a group; one a round."""
    draws: list[float] = field(default_factory=list)
    """Seconds a batch."""
    settles: list[float] = field(default_factory=list)
    """Seconds an ack, where there is one."""


@dataclass(frozen=True)
class Spread:
    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(min(values), statistics.median(values), max(values))


def measure(door: Door, pids: Sequence[int], plan: Plan, payloads: Sequence[Payload], samples: Samples) -> None:
    """One round of one door. `pids`: the processes that serve it."""
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
    """`rounds` rounds of everybody, another one first each time."""
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
