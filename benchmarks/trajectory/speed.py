"""The speed case: reference, native, compatible and floor with the same payloads, for each shape of group."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import ExitStack

from benchmarks.trajectory import floor, rounds
from benchmarks.trajectory.clients import Http, Request
from benchmarks.trajectory.doors import AtroposDoor, Door, NativeDoor
from benchmarks.trajectory.payloads import Shape, make
from benchmarks.trajectory.rounds import Plan, Samples
from benchmarks.trajectory.servers import Uvicorn
from tests.support.redis_server import RedisServer

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


def has_atropos(port: int) -> bool:
    """Returns whether the server implements Atropos' protocol at its root."""
    http = Http(port)
    answer = http.send(Request("GET", "/info"))
    http.close()
    return answer.status == 200


def run(
    shape: Shape, reference: Uvicorn, api: Uvicorn, redis: RedisServer, times: int, say: Callable[[str], None]
) -> dict[str, Samples]:
    """Measures the rounds of one shape."""
    say(f"{shape.name}: making {CONTENTS} groups' payloads")
    payloads = [make(shape, seed) for seed in range(CONTENTS)]
    native = NativeDoor(api.port, shape, f"bench-{shape.sequences}-{shape.tokens}-{time.time_ns()}")
    plans = PLANS[shape.sequences, shape.tokens]

    def theirs(door: Door) -> Callable[[Samples], None]:
        return functools.partial(rounds.measure, door, [reference.pid], plans[REFERENCE], payloads)

    def ours(plan: str, door: Door) -> Callable[[Samples], None]:
        return functools.partial(rounds.measure, door, [api.pid, redis.pid], plans[plan], payloads)

    work = {REFERENCE: theirs(AtroposDoor(REFERENCE, reference.port, shape, gzipped=False))}
    with ExitStack() as end:
        native.open()
        end.callback(native.close)
        work[NATIVE] = ours(NATIVE, native)
        work[REFERENCE + GZIPPED] = theirs(AtroposDoor(REFERENCE, reference.port, shape, gzipped=True))
        if has_atropos(api.port):
            work[COMPATIBLE] = ours(COMPATIBLE, AtroposDoor(COMPATIBLE, api.port, shape, gzipped=False))
            work[COMPATIBLE + GZIPPED] = ours(COMPATIBLE, AtroposDoor(COMPATIBLE, api.port, shape, gzipped=True))
        else:
            say("the compatible API is missing: skipped")
        work[FLOOR] = functools.partial(floor.measure, redis.url, plans[FLOOR], payloads)
        return rounds.interleave(work, times, say)
