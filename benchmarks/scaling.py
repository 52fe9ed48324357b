"""Groups per second with one, two and four environments, and with one of two model servers dead.

`make bench ARGS=scaling` runs this measurement.

The model server is a stub with a fixed latency (benchmarks/stub_model_server.py). Redis, API and environments are real,
and share the cores of this machine. Each environment works on `--workers` prompts at a time, so its ideal rate is
workers / latency. The measured rate counts the groups that the API accepts.

Then one environment uses two servers, each of which works on half of the prompts at a time. One server is killed with
SIGKILL, and starts again later on its port. The measurement begins right after the kill, and a minute after the start,
because the environment sends no requests to a failed server for up to 45 seconds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import httpx
from benchmarks import machine, script
from benchmarks.env.stack import Bench, Load, bench
from benchmarks.services import start_stub

from gristmill import SyncClient
from gristmill_cli.local.processes import free_port

_COUNTS = (1, 2, 4)
_SERVERS = ("both", "one is dead", "both again")
_PAUSE_SECONDS = 60.0
"""Longer than an environment's longest pause for a server."""
_ROWS = 5000
_TARGET = 3.6
"""Four environments should have at least this many times the rate of one."""


def main() -> None:
    parser = script.parser("scaling", __doc__)
    parser.add_argument("--latency", type=float, default=2.0, help="seconds per request; default: 2")
    parser.add_argument("--workers", type=int, default=8, help="prompts at a time per environment; default: 8")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each measurement; default: 30")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each number; default: 3")
    options = parser.parse_args()
    facts = machine.hardware()
    rates: dict[int, list[float]] = {count: [] for count in _COUNTS}
    lost: dict[str, list[float]] = {name: [] for name in _SERVERS}
    load, latency = Load(model="tiny", workers=options.workers, max_tokens=32), str(options.latency)
    with (
        tempfile.TemporaryDirectory() as folder,
        bench(Path(folder) / "bench", load, {"STUB_LATENCY_S": latency}) as started,
    ):
        for number in range(options.rounds):
            for count in _COUNTS if number % 2 else reversed(_COUNTS):
                rates[count].append(_rate(started, f"scaling-{number}-{count}", count, options))
                script.say(f"round {number + 1}: {count} environments: {rates[count][-1]:.2f} groups/s")
        for number in range(options.rounds):
            for name, rate in zip(_SERVERS, _rates_with_a_kill(started, f"servers-{number}", options), strict=True):
                lost[name].append(rate)
                script.say(f"round {number + 1}: {name}: {rate:.2f} groups/s")
    page = _page(facts, rates, lost, options)
    script.publish(page, options.results, "scaling")


def _rates_with_a_kill(bench: Bench, run: str, options: argparse.Namespace) -> list[float]:
    """Returns the groups per second with two servers, with one of them dead, and with both again."""
    places = {"STUB_LATENCY_S": str(options.latency), "STUB_AT_A_TIME": str(max(1, options.workers // 2))}
    ports = [free_port(), free_port()]
    stubs = [start_stub(bench.processes, port, places) for port in ports]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    bench.config(run, _ROWS)
    environment = bench.serve(run, ",".join(urls))
    version = {"new_version": bench.take(run)}
    for url in urls:
        httpx.post(f"{url}/update_weight_version", json=version).raise_for_status()
    with SyncClient(bench.api_url) as api:
        while api.status(run).accepted < 2 * options.workers:
            if environment.exit_code is not None:
                raise environment.failure()
            time.sleep(0.1)
        both = _accepted_per_second(api, run, options)
        stubs[0].process.kill()
        with_one_dead = _accepted_per_second(api, run, options)
        stubs[0] = start_stub(bench.processes, ports[0], places)
        httpx.post(f"{urls[0]}/update_weight_version", json=version).raise_for_status()
        time.sleep(_PAUSE_SECONDS)
        again = _accepted_per_second(api, run, options)
    for service in (environment, *stubs):
        service.stop(grace=20)
    bench.close(run)
    return [both, with_one_dead, again]


def _rate(bench: Bench, run: str, count: int, options: argparse.Namespace) -> float:
    """Returns the groups per second that the API accepts from `count` environments of one run."""
    bench.config(run, _ROWS)
    environments = [bench.serve(run) for _ in range(count)]
    bench.take(run)
    with SyncClient(bench.api_url) as api:
        # Every environment submits before the measurement starts.
        while len(api.environments(run)) < count or api.status(run).accepted < 2 * count * options.workers:
            for environment in environments:
                if environment.exit_code is not None:
                    raise environment.failure()
            time.sleep(0.1)
        rate = _accepted_per_second(api, run, options)
    for environment in environments:
        environment.stop(grace=20)
    bench.close(run)
    return rate


def _accepted_per_second(api: SyncClient, run: str, options: argparse.Namespace) -> float:
    started, before = time.monotonic(), api.status(run).accepted
    time.sleep(options.seconds)
    return (api.status(run).accepted - before) / (time.monotonic() - started)


def _page(
    facts: dict[str, str], rates: dict[int, list[float]], lost: dict[str, list[float]], options: argparse.Namespace
) -> str:
    rate_of_one = statistics.median(rates[1])
    facts |= {"latency": f"{options.latency:g} s; prompts at a time per environment: {options.workers}"}
    lines = script.heading("Environments against a server with a fixed latency", facts)
    target = f"Target: four environments have at least {_TARGET} times the rate of one."
    lines += [f"Medians of {options.rounds} measurements of {options.seconds:g} s. {target}", ""]
    lines += ["| environments | groups/s | share of the ideal rate | times the rate of one | lowest | highest |"]
    lines += ["|---|---|---|---|---|---|"]
    for count, measured in rates.items():
        rate, ideal = statistics.median(measured), count * options.workers / options.latency
        spread = f"{min(measured):.2f} | {max(measured):.2f}"
        lines.append(f"| {count} | {rate:.2f} | {rate / ideal:.2f} | {rate / rate_of_one:.2f} | {spread} |")
    lines += ["", "## A dead model server", ""]
    lines += [f"One environment and two servers, each of which works on {options.workers // 2} prompts at a time.", ""]
    lines += ["| servers | groups/s | times the rate of both | lowest | highest |", "|---|---|---|---|---|"]
    both = statistics.median(lost[_SERVERS[0]])
    for name, measured in lost.items():
        rate = statistics.median(measured)
        lines.append(f"| {name} | {rate:.2f} | {rate / both:.2f} | {min(measured):.2f} | {max(measured):.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
