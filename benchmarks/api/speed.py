"""The speed case: submits and draws through each interface with the same payloads, for each shape of group.

The interfaces take turns in each round, so that a slow minute slows all of them. The floor is Redis alone: clients SET
and GET the same bytes and do nothing else. No API can be faster.
"""

from __future__ import annotations

import asyncio
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from benchmarks.api.clients import CLIENTS, Http, Request, UnexpectedAnswer, load
from benchmarks.api.interfaces import BATCH_GROUPS, AtroposInterface, Interface, NativeInterface
from benchmarks.api.payloads import Payload, Shape, make
from benchmarks.api.servers import Uvicorn
from benchmarks.machine import cpu_seconds
from redis.asyncio import BlockingConnectionPool, Redis
from tests.support.redis_server import RedisServer


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


SHAPES = (Shape(8, 1024), Shape(16, 4096))
CONTENTS = 16
"""Number of different contents of groups, which are submitted in turn."""

REFERENCE, NATIVE, COMPATIBLE, FLOOR = "atroposlib 0.4.0", "native", "compatible", "Redis alone"
GZIPPED = " gzip"
"""Suffix of an interface's name: bodies are gzipped in both directions."""

# Groups and draws per round: about a second of submits at the measured speed, and draws that do not take much longer.
PLANS = {
    (8, 1024): {REFERENCE: Plan(192, 4), COMPATIBLE: Plan(512, 16), NATIVE: Plan(1024, 32), FLOOR: Plan(2048, 32)},
    (16, 4096): {REFERENCE: Plan(32, 2), COMPATIBLE: Plan(96, 8), NATIVE: Plan(192, 16), FLOOR: Plan(192, 16)},
}


def run(
    shape: Shape, reference: Uvicorn, api: Uvicorn, redis: RedisServer, times: int, say: Callable[[str], None]
) -> dict[str, Samples]:
    """Measures the rounds of one shape."""
    say(f"{shape.name}: making {CONTENTS} groups' payloads")
    payloads = [make(shape, seed) for seed in range(CONTENTS)]
    native = NativeInterface(api.port, shape, f"bench-{shape.sequences}-{shape.tokens}-{time.time_ns()}")
    plans = PLANS[shape.sequences, shape.tokens]

    def theirs(interface: Interface) -> Callable[[Samples], None]:
        return functools.partial(_measure, interface, [reference.pid], plans[REFERENCE], payloads)

    def ours(plan: str, interface: Interface) -> Callable[[Samples], None]:
        return functools.partial(_measure, interface, [api.pid, redis.pid], plans[plan], payloads)

    work = {REFERENCE: theirs(AtroposInterface(REFERENCE, reference.port, shape, gzipped=False))}
    with ExitStack() as end:
        native.open()
        end.callback(native.close)
        work[NATIVE] = ours(NATIVE, native)
        work[REFERENCE + GZIPPED] = theirs(AtroposInterface(REFERENCE, reference.port, shape, gzipped=True))
        if _has_atropos(api.port):
            work[COMPATIBLE] = ours(COMPATIBLE, AtroposInterface(COMPATIBLE, api.port, shape, gzipped=False))
            work[COMPATIBLE + GZIPPED] = ours(COMPATIBLE, AtroposInterface(COMPATIBLE, api.port, shape, gzipped=True))
        else:
            say("the compatible API is missing: skipped")
        work[FLOOR] = functools.partial(_measure_redis, redis.url, plans[FLOOR], payloads)
        return _interleave(work, times, say)


def _has_atropos(port: int) -> bool:
    """Returns whether the server implements Atropos' protocol at its root."""
    http = Http(port)
    answer = http.send(Request("GET", "/info"))
    http.close()
    return answer.status == 200


def _measure(
    interface: Interface, pids: Sequence[int], plan: Plan, payloads: Sequence[Payload], samples: Samples
) -> None:
    """Measures one round of one interface. `pids`: the processes that serve the interface."""
    requests = interface.prepare(payloads, plan.groups)
    before = cpu_seconds(*pids)
    done = load(requests, interface.port)
    samples.submit_cpu.append((cpu_seconds(*pids) - before) / plan.groups)
    samples.submits.append(plan.groups / done.seconds)
    samples.submit_latencies += done.latencies
    http = Http(interface.port)
    for _ in range(plan.draws):
        before = time.monotonic()
        answer = interface.draw(http)
        drawn = time.monotonic()
        interface.settle(http)
        samples.draws.append(drawn - before)
        samples.settles.append(time.monotonic() - drawn)
    if not interface.holds(answer, payloads):
        raise UnexpectedAnswer(f"{interface.name}: its last batch is not {BATCH_GROUPS} groups as they were submitted")
    http.close()


def _interleave(
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


def _measure_redis(redis_url: str, plan: Plan, payloads: Sequence[Payload], samples: Samples) -> None:
    """Measures one round: `plan.groups` SETs by CLIENTS clients, then MGETs with one batch each."""
    asyncio.run(
        _set_and_get(redis_url, plan, [b"".join(payload.native("bench", 0, "bench")) for payload in payloads], samples)
    )


async def _set_and_get(redis_url: str, plan: Plan, bodies: Sequence[bytes], samples: Samples) -> None:
    pool = BlockingConnectionPool.from_url(redis_url, max_connections=CLIENTS)
    async with Redis.from_pool(pool) as redis:
        names = [f"floor:{index}" for index in range(plan.groups)]
        await asyncio.gather(*(redis.ping() for _ in range(CLIENTS)))  # make the connections

        async def client(index: int) -> None:
            for number in range(index, plan.groups, CLIENTS):
                await redis.set(names[number], bodies[number % len(bodies)])

        started = time.monotonic()
        await asyncio.gather(*(client(index) for index in range(CLIENTS)))
        samples.submits.append(plan.groups / (time.monotonic() - started))
        for draw in range(plan.draws):
            wanted = names[draw * BATCH_GROUPS % plan.groups :][:BATCH_GROUPS]
            before = time.monotonic()
            await redis.mget(wanted)
            samples.draws.append(time.monotonic() - before)
        await redis.delete(*names)
    await pool.disconnect()
