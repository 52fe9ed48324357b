#!/usr/bin/env python3
"""The trajectory API against atroposlib's server, in one run, on the same payloads.

Both servers, a real Redis (append-only, fsync always) and 16 client processes share this machine, all on loopback.
The servers take turns in each round, so ratios hold although absolute figures drift. Three cases:

    speed    submit and draw: the reference, our `/v1`, our Atropos-compatible routes, Redis alone
    queue    Redis commands and latency of status and lease with queues of 10 to 10,000 groups
    memory   of the API while 10 GB pass through each protocol, and of Redis per stored byte

Clients take permits and encode payloads before the clock starts. They read answers and do not decode them. A native
draw is the lease; its ack has a separate column. `make bench ARGS=api` runs all cases and writes benchmarks/results/.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import machine, script
from benchmarks.api import memory, queue_length, report, servers, speed
from benchmarks.api.payloads import make
from benchmarks.api.report import Results
from tests.support.redis_server import RedisServer

_ROOT = Path(__file__).parents[2]
_CASES = ("speed", "queue", "memory")


def main() -> None:
    options = _options()
    quick: bool = options.quick
    results = Results(machine.facts(options.atropos_python))
    if "speed" in options.cases:
        _speed(results, options.atropos_python, rounds=2 if quick else 7)
    if "queue" in options.cases:
        with RedisServer() as redis, servers.gristmill(redis.url) as api:
            results.costs = queue_length.run(api, redis.url, 20 if quick else 200, script.say)
    if "memory" in options.cases:
        _memory(results, pushed=0.5e9 if quick else 10e9, stored=300e6 if quick else 500e6)
    script.publish(report.page(results), options.results, "api", results.json())


def _options() -> argparse.Namespace:
    parser = script.parser("api", __doc__)
    parser.add_argument("cases", nargs="*", default=_CASES, metavar="case", help="speed, queue, memory; default: all")
    parser.add_argument(
        "--quick", action="store_true", help="few rounds, 0.5 GB instead of 10: minutes, coarse figures"
    )
    parser.add_argument(
        "--atropos-python", type=Path, default=_ROOT / ".venv-atropos" / "bin" / "python",
        help="python of an environment with atroposlib 0.4.0",
    )  # fmt: skip
    options = parser.parse_args()
    for case in options.cases:
        if case not in _CASES:
            parser.error(f"no case {case!r}; there are {', '.join(_CASES)}")
    return options


def _speed(results: Results, atropos_python: Path, rounds: int) -> None:
    with RedisServer() as redis, servers.gristmill(redis.url) as api, servers.reference(atropos_python) as reference:
        for shape in speed.SHAPES:
            results.speed[shape.name] = speed.run(shape, reference, api, redis, rounds, script.say)
            sample = make(shape, 0)
            results.sizes[shape.name] = {
                "binary": sample.native_size, "JSON": len(sample.plain), "gzipped JSON": len(sample.gzipped),
            }  # fmt: skip


def _memory(results: Results, pushed: float, stored: float) -> None:
    with RedisServer() as redis, servers.gristmill(redis.url) as api:
        for shape in speed.SHAPES:
            script.say(f"memory of Redis with {stored / 1e6:.0f} MB of groups of {shape.name}")
            results.stored.append(memory.store(api, redis.url, shape, int(stored)))
    payloads = [make(memory.SHAPE, seed) for seed in range(4)]
    for feed in (memory.NativeFeed, memory.CompatibleFeed):
        with RedisServer() as redis, servers.gristmill(redis.url) as api:
            results.pushes.append(memory.push(api, redis.url, feed(api.port, payloads), int(pushed), script.say))


if __name__ == "__main__":
    main()
