"""Submits per second of one and two API processes over one Redis, and the cost of an idle stack.

`make bench ARGS=capacity` runs this measurement.

docs/operations.md computes from these figures how many GPUs one stack serves. Clients, API and Redis share the
cores of this machine, so the page also shows the processor time of each, and how many cores all of them used.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import machine, script
from benchmarks.api.clients import CLIENTS, Http, Request, load
from benchmarks.api.interfaces import NativeInterface
from benchmarks.api.payloads import Payload, Shape, make
from benchmarks.api.servers import Uvicorn, gristmill
from benchmarks.env.stack import Load, bench
from tests.support.redis_server import RedisServer

from gristmill import SyncClient

_SHAPE = Shape(8, 1024)
_CONTENTS = 16
_RATIO = 1.6
"""Two API processes should accept at least this many times the groups per second of one."""
_SHARE, _MEGABYTES = 0.02, 300
"""Most that redis, api and env may use together while nothing happens: of one core, and of memory."""
_WITH_TORCH = "env beside torch"
_AS_IN_THE_IMAGE = """
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.partition(".")[0] == "torch" else found(name, *rest)
from gristmill_env.cli import main
sys.exit(main())
"""
"""Starts the environment without torch, which its image does not have. transformers imports torch if it finds it."""


@dataclass(frozen=True)
class Round:
    """One measurement of submits. CPU times are seconds per group."""

    rate: float
    """Groups per second."""
    api: float
    redis: float
    clients: float


@dataclass(frozen=True)
class Idle:
    """What one service used while nothing happened."""

    name: str
    share: float
    """Of one core."""
    rss: int
    """Resident bytes, which include pages that processes share."""


def main() -> None:
    parser = script.parser("capacity", __doc__)
    parser.add_argument("--groups", type=int, default=4096, help="submits of each measurement; default: 4096")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each number; default: 7")
    parser.add_argument("--idle", type=float, default=60.0, help="seconds without work; default: 60")
    options = parser.parse_args()
    facts = machine.hardware()
    rounds = _submits(options.groups, options.rounds)
    with tempfile.TemporaryDirectory() as folder:
        idle = _idle(Path(folder), options.idle)
    page = _page(facts, rounds, idle, options)
    script.publish(page, options.results, "capacity")


def _submits(groups: int, times: int) -> dict[int, list[Round]]:
    """Returns the measurements by the number of API processes. The numbers take turns."""
    payloads = [make(_SHAPE, seed) for seed in range(_CONTENTS)]
    rounds: dict[int, list[Round]] = {1: [], 2: []}
    with RedisServer() as redis, gristmill(redis.url) as first, gristmill(redis.url) as second:
        run = NativeInterface(first.port, _SHAPE, "capacity")
        run.open()
        for index in range(times):
            for count in (1, 2) if index % 2 else (2, 1):
                apis = (first, second)[:count]
                rounds[count].append(_round(run, payloads, groups, apis, redis))
                script.say(f"round {index + 1}: {count} API: {rounds[count][-1].rate:.0f} groups/s")
                _empty(run)
        run.close()
    return rounds


def _round(
    run: NativeInterface, payloads: Sequence[Payload], groups: int, apis: Sequence[Uvicorn], redis: RedisServer
) -> Round:
    requests: list[Request] = run.prepare(payloads, groups)
    pids = [api.pid for api in apis]
    api, stored, own = machine.cpu_seconds(*pids), machine.cpu_seconds(redis.pid), _children_cpu()
    done = load(requests, *(api.port for api in apis))
    return Round(
        rate=groups / done.seconds,
        api=(machine.cpu_seconds(*pids) - api) / groups,
        redis=(machine.cpu_seconds(redis.pid) - stored) / groups,
        clients=(_children_cpu() - own) / groups,
    )


def _empty(run: NativeInterface) -> None:
    """Leases and acks all groups, so that Redis holds none."""
    http = Http(run.port)
    while run.lease(http, 64, wait=0).status == 200:
        run.settle(http)
    http.close()


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _idle(folder: Path, seconds: float) -> list[Idle]:
    """Measures a stack whose environments wait for a trainer: one as in its image, and one beside torch, as after
    `make setup`."""
    load = Load(model="tiny", workers=8, max_tokens=32)
    with bench(folder / "bench", load, {}, GRISTMILL_RUNS_DIR=str(folder / "runs")) as started:
        services = {service.name: service for service in started.processes.services if service.name != "model"}
        started.config("idle", 100)
        command = [sys.executable, "-c", _AS_IN_THE_IMAGE, "serve", "--config", "idle"]
        services["env"] = started.processes.start("env", command, started.environ())
        services[_WITH_TORCH] = started.serve("idle")
        with SyncClient(started.api_url) as api:
            started.processes.wait_until(services["env"], lambda: _waiting(api) == 2, timeout=60)
        time.sleep(5)  # What a service does once after its start ends.
        pids = {name: machine.with_children(service.process.pid) for name, service in services.items()}
        before = {name: machine.cpu_seconds(*ids) for name, ids in pids.items()}
        time.sleep(seconds)
        idle = [
            Idle(
                name,
                (machine.cpu_seconds(*ids) - before[name]) / seconds,
                sum(machine.rss(pid) for pid in ids),
            )
            for name, ids in pids.items()
        ]
        for name in ("env", _WITH_TORCH):
            services[name].stop(grace=20)
        return idle


def _waiting(api: SyncClient) -> int:
    """Returns the number of environments that serve the run and wait for permits."""
    return len(api.environments("idle")) if api.open_run(0) is not None else 0


def _page(
    facts: dict[str, str], rounds: dict[int, list[Round]], idle: Sequence[Idle], options: argparse.Namespace
) -> str:
    rates = {count: statistics.median(measured.rate for measured in of_count) for count, of_count in rounds.items()}
    ratio, cores = rates[2] / rates[1], os.cpu_count() or 1
    lines = [*script.heading("Capacity: API processes, and an idle stack", facts), "## Submits", ""]
    lines += [f"{CLIENTS} clients submit groups of {_SHAPE.name} tokens. Medians of {options.rounds} measurements of"]
    lines += [
        f"{options.groups} groups. Target: two API processes accept at least {_RATIO} times the groups of one.",
        "",
    ]
    lines += [
        "| API processes | groups/s | × | lowest | highest | CPU ms a group: API | Redis | clients | cores in use |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    spent: dict[int, tuple[float, float, float]] = {}
    for count, of_count in rounds.items():
        spent[count] = (
            statistics.median(measured.api for measured in of_count),
            statistics.median(measured.redis for measured in of_count),
            statistics.median(measured.clients for measured in of_count),
        )
        low, high = min(measured.rate for measured in of_count), max(measured.rate for measured in of_count)
        cpu = " | ".join(f"{1000 * value:.2f}" for value in spent[count])
        lines.append(
            f"| {count} | {rates[count]:,.0f} | {rates[count] / rates[1]:.2f} | {low:,.0f} | {high:,.0f} | {cpu} | "
            f"{rates[count] * sum(spent[count]):.2f} of {cores} |"
        )
    api, redis, _ = spent[1]
    used = rates[1] * sum(spent[1])
    lines += [
        "",
        f"The target is {'met' if ratio >= _RATIO else 'missed'}: {ratio:.2f}. With one API process, clients, API",
    ]
    lines += [
        f"and Redis use {used:.2f} of {cores} cores, so two can have at most {cores / used:.2f} times its rate here."
    ]
    lines += [
        f"By its processor time, an API process with a core of its own ends at {1 / api:,.0f} groups/s, and Redis"
    ]
    lines += [f"at {1 / redis:,.0f}."]
    image = [service for service in idle if service.name != _WITH_TORCH]
    share, memory = sum(service.share for service in image), sum(service.rss for service in image)
    lines += ["", "## Idle", "", f"{options.idle:g} s in which the environments of an open run wait for a trainer.", ""]
    lines += ["| service | share of a core | resident MB |", "|---|---|---|"]
    lines += [f"| {service.name} | {service.share:.2%} | {service.rss / 1e6:.0f} |" for service in idle]
    lines += [
        f"| redis, api and env | {share:.2%} (at most {_SHARE:.0%}) | {memory / 1e6:.0f} (at most {_MEGABYTES}) |"
    ]
    lines += [
        "",
        "`env` is without torch, as in its image. In a virtual environment with torch, as after `make setup`,",
    ]
    lines += ["transformers imports torch."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
