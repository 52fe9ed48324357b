"""The cost of a SIGKILL of Redis under `--appendfsync always` and under `everysec`: `make bench ARGS=durability`.

The disk is kept busy with new files, as a trainer's checkpoints do. While an fsync takes long, everysec keeps writes
in memory that the server has already acknowledged. Two cases in each mode:

    run      the kill loop of the tests (tests/support/kill_loop.py), killing Redis only
    writes   one client that writes to Redis alone, as fast as it can; four times the kills

The script compares the number of acknowledged writes that are lost, not times.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import platform
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import redis
from benchmarks import machine
from tests.support.kill_loop import KillLoop, Outcome
from tests.support.redis_server import RedisServer

from gristmill_cli.local.redis_server import redis_server

MODES = ("always", "everysec")
_CHUNK = bytes(8 << 20)
_CHECKPOINT = 256 << 20
_LOAD = os.getloadavg()
_LEGEND = """Lost: a submit was answered 2xx and the group is neither in the weights nor in the store. Trained twice: in
the weights, or in the weights and in the queue again, because Redis forgot an ack. Trainer restarts: its leases or its
incarnation were forgotten.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="kills in each mode of a run; default: 60")
    parser.add_argument("--seed", type=int, default=1, help="of the kills' schedule; default: 1")
    parser.add_argument("--results", type=Path, help="folder to write durability.md to; default: only show it")
    options = parser.parse_args()
    with _busy_disk():
        writes = {mode: _writes(mode, 4 * options.rounds, options.seed) for mode in MODES}
        runs = {mode: _run(mode, options.rounds, options.seed) for mode in MODES}
    page = _page(runs, writes)
    print(page, end="")
    if options.results is not None:
        options.results.mkdir(parents=True, exist_ok=True)
        (options.results / "durability.md").write_text(page)


def _run(mode: str, rounds: int, seed: int) -> Outcome:
    loop = KillLoop(rounds=rounds, seed=seed, groups_per_step=32, victims=("redis",), redis=("--appendfsync", mode))
    with loop:
        outcome = loop.run()
    print(f"{mode}: {outcome.text()}", file=sys.stderr)
    return outcome


@dataclass(frozen=True)
class Writes:
    kills: int
    acknowledged: int
    lost: int
    kills_that_lost: int


def _writes(mode: str, rounds: int, seed: int) -> Writes:
    rng = random.Random(seed)
    acknowledged, lost = 0, []
    with RedisServer("--appendfsync", mode) as server:
        for _ in range(rounds):
            answered = _write_until_killed(server, rng.uniform(0.2, 2.5))
            server.start()
            with redis.Redis.from_url(server.url) as client:
                kept = int(client.get("number") or 0)
                client.flushall()
            acknowledged += answered
            lost.append(max(answered - kept, 0))
    found = Writes(rounds, acknowledged, sum(lost), sum(count > 0 for count in lost))
    print(f"{mode}: {found}", file=sys.stderr)
    return found


def _write_until_killed(server: RedisServer, seconds: float) -> int:
    """Counts up in Redis and writes 2 kB with each count. Returns the last acknowledged count."""
    killer = threading.Timer(seconds, server.kill)
    killer.start()
    number = 0
    try:
        with redis.Redis.from_url(server.url) as client:
            while True:
                client.mset({"number": number + 1, f"payload:{number % 1000}": bytes(2000)})
                number += 1
    except redis.ConnectionError:
        return number
    finally:
        killer.join()


@contextlib.contextmanager
def _busy_disk() -> Iterator[None]:
    """Writes and fsyncs new files inside the block, as checkpoints do, on the disk of Redis' file."""
    stop = threading.Event()

    def write() -> None:
        with tempfile.TemporaryDirectory(prefix="gristmill-busy-") as folder:
            for number in itertools.count():
                if stop.is_set():
                    return
                with (Path(folder) / f"checkpoint-{number % 2}").open("wb") as file:
                    for _ in range(_CHECKPOINT // len(_CHUNK)):
                        file.write(_CHUNK)
                    file.flush()
                    os.fsync(file.fileno())

    writer = threading.Thread(target=write, name="busy-disk")
    writer.start()
    try:
        yield
    finally:
        stop.set()
        writer.join()


def _page(runs: dict[str, Outcome], writes: dict[str, Writes]) -> str:
    facts = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": machine.command(),
        "machine": f"{os.cpu_count()} cores, {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') >> 30} GiB, "
        f"{platform.system()}; load before: {_LOAD[0]:.0f}",
        "redis": _redis_version(),
        "python": platform.python_version(),
    }
    lines = ["# SIGKILL of Redis: what was acknowledged and is gone", ""]
    lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items()), ""]
    lines += ["## A run: environments and a trainer through the API", ""]
    lines += ["| appendfsync | kills of Redis | groups acknowledged | lost | trained twice | trainer restarts |"]
    lines += ["|---|---|---|---|---|---|"]
    for mode, outcome in runs.items():
        counts = outcome.ledger.counts()
        twice = counts["trained_twice"] + counts["in_two_places"]
        row = (mode, outcome.kills["redis"], counts["acknowledged"], counts["lost"], twice)
        lines.append(f"| {' | '.join(map(str, row))} | {len(outcome.ended_by_themselves)} |")
    lines += ["", _LEGEND, "## One client that writes to Redis alone", ""]
    lines += ["| appendfsync | kills of Redis | writes acknowledged | lost | kills that lost any |"]
    lines += ["|---|---|---|---|---|"]
    for mode, found in writes.items():
        lines.append(f"| {mode} | {found.kills} | {found.acknowledged} | {found.lost} | {found.kills_that_lost} |")
    return "\n".join(lines) + "\n"


def _redis_version() -> str:
    output = subprocess.run([str(redis_server()), "--version"], check=True, capture_output=True, text=True).stdout
    return next(word.removeprefix("v=") for word in output.split() if word.startswith("v="))


if __name__ == "__main__":
    main()
