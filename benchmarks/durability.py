"""What a SIGKILL of Redis costs under `--appendfsync always` and under `everysec`: `make bench-durability`.

The kill loop of the tests (tests/support/kill_loop.py), killing Redis only, once in each mode, on a disk that another
process keeps busy, as a trainer's checkpoints do: while an fsync takes long, everysec holds writes back in memory that
clients were already told of. Seconds are not compared; the modes' groups, lost groups and groups trained twice are.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from tests.support.kill_loop import KillLoop, Outcome

from redis_binary import redis_server

MODES = ("always", "everysec")
_CHUNK = bytes(8 << 20)
_CHECKPOINT = 256 << 20
_LEGEND = """

Lost: a submit was answered 2xx and the group is neither in the weights nor in the store. Trained twice: in the
weights, or in the weights and in the queue again, because Redis forgot an ack. Trainer restarts: its leases or its
incarnation were forgotten.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100, help="kills in each mode; default: 100")
    parser.add_argument("--seed", type=int, default=1, help="of the kills' schedule; default: 1")
    parser.add_argument("--results", type=Path, help="file to write the page to; default: only show it")
    options = parser.parse_args()
    with _busy_disk():
        outcomes = {mode: _run(mode, options.rounds, options.seed) for mode in MODES}
    page = _page(outcomes)
    print(page, end="")
    if options.results is not None:
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(page)


def _run(mode: str, rounds: int, seed: int) -> Outcome:
    loop = KillLoop(rounds=rounds, seed=seed, groups_per_step=32, victims=("redis",), redis=("--appendfsync", mode))
    with loop:
        outcome = loop.run()
    print(f"{mode}: {outcome.text()}", file=sys.stderr)
    return outcome


@contextlib.contextmanager
def _busy_disk() -> Iterator[None]:
    """Write new files and fsync them, as checkpoints are, on the disk of Redis' file, while the context lasts."""
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


def _page(outcomes: dict[str, Outcome]) -> str:
    facts = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": shlex.join(["python", "-m", "benchmarks.durability", *sys.argv[1:]]),
        "machine": f"{os.cpu_count()} cores, {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') >> 30} GiB, "
        f"{platform.system()}",
        "redis": _redis_version(),
        "python": platform.python_version(),
    }
    lines = ["# SIGKILL of Redis: what was acknowledged and is gone", ""]
    lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items()), ""]
    lines += ["| appendfsync | kills of Redis | groups acknowledged | lost | trained twice | trainer restarts |"]
    lines += ["|---|---|---|---|---|---|"]
    for mode, outcome in outcomes.items():
        counts = outcome.ledger.counts()
        twice = counts["trained_twice"] + counts["in_two_places"]
        row = (mode, outcome.kills["redis"], counts["acknowledged"], counts["lost"], twice)
        lines.append(f"| {' | '.join(map(str, row))} | {len(outcome.ended_by_themselves)} |")
    return "\n".join(lines) + _LEGEND


def _redis_version() -> str:
    told = subprocess.run([str(redis_server()), "--version"], check=True, capture_output=True, text=True).stdout
    return next(word.removeprefix("v=") for word in told.split() if word.startswith("v="))


if __name__ == "__main__":
    main()
