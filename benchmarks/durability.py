"""The cost of a SIGKILL of Redis under `--appendfsync always` and under `everysec`: `make bench ARGS=durability`.

The disk is kept busy with new files, as a trainer's checkpoints do. While an fsync takes long, everysec keeps writes
in memory that the server has already acknowledged. Two cases in each mode:

    run      the kill loop of the tests (tests/support/kill_loop.py), killing Redis only
    writes   one client that writes to Redis alone, as fast as it can; four times the kills

The script compares the number of acknowledged writes that are lost, not times.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import redis
from benchmarks import machine, script
from tests.support.kill_loop import KillLoop, Outcome
from tests.support.redis_server import RedisServer

MODES = ("always", "everysec")
_CHUNK = bytes(8 << 20)
_CHECKPOINT = 256 << 20
_LEGEND = """Lost: a submit was answered 2xx and the group is neither in the weights nor in the store. Trained twice: in
the weights, or in the weights and in the queue again, because Redis forgot an ack. Trainer restarts: its leases or its
incarnation were forgotten.
"""


def main() -> None:
    parser = script.parser("durability", __doc__)
    parser.add_argument("--rounds", type=int, default=60, help="kills in each mode of a run; default: 60")
    parser.add_argument("--seed", type=int, default=1, help="of the kills' schedule; default: 1")
    options = parser.parse_args()
    facts = machine.hardware() | machine.redis()
    with _busy_disk():
        writes = {mode: _writes(mode, 4 * options.rounds, options.seed) for mode in MODES}
        runs = {mode: _run(mode, options.rounds, options.seed) for mode in MODES}
    page = _page(facts, runs, writes)
    script.publish(page, options.results, "durability")


def _run(mode: str, rounds: int, seed: int) -> Outcome:
    loop = KillLoop(rounds=rounds, seed=seed, groups_per_step=32, victims=("redis",), redis=("--appendfsync", mode))
    with loop:
        outcome = loop.run()
    script.say(f"{mode}: {outcome.text()}")
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
    script.say(f"{mode}: {found}")
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


def _page(facts: dict[str, str], runs: dict[str, Outcome], writes: dict[str, Writes]) -> str:
    lines = script.heading("SIGKILL of Redis: what was acknowledged and is gone", facts)
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


if __name__ == "__main__":
    main()
