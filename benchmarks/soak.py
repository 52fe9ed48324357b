"""Memory, open files and disk of a long run: growth of each service and folder per thousand steps.

Trains the quickstart with real services for some minutes, `max_staleness: 1`, a checkpoint each minute and an
evaluation every 200 steps. A client has the page's events open all the time, and opens them again each minute. Every
ten seconds the resident memory, file descriptors and threads of each service are read, with its child processes, and
the bytes of the folders.

Growth is Theil and Sen's slope (the median of the slopes of all pairs of samples) over the second half of the run, as
caches fill in the first. Its interval holds the true slope of independent samples with a chance of 95 % (Sen, 1968).
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from benchmarks import machine, script
from benchmarks.services import Services, start_services
from tests.support.stack import ROOT

from gristmill_cli.local.processes import Service

_EVERY_S, _PAGE_S = 10.0, 60.0
_RUN = "soak"
_FOLDERS = ("redis", "runs", "weights")
_SETTINGS = {"trainer.max_staleness": "1", "trainer.checkpoint_interval": "1min", "steps_per_eval": "200"}
MIB = 1 << 20


@dataclass(frozen=True)
class Sample:
    """One reading of a service or folder."""

    step: int
    size: float
    """MiB of resident memory, or of the files of a folder."""
    files: int = 0
    """File descriptors; the number of files of a folder."""
    threads: int = 0


@dataclass(frozen=True)
class Growth:
    """Growth per thousand steps, and its interval."""

    slope: float
    low: float
    high: float


def growth(steps: Sequence[int], values: Sequence[float]) -> Growth:
    """Returns Theil and Sen's slope per thousand steps, with Sen's interval of 95 %. Needs two steps."""
    pairs = itertools.combinations(zip(steps, values, strict=True), 2)
    slopes = sorted(1000 * (later[1] - one[1]) / (later[0] - one[0]) for one, later in pairs if later[0] != one[0])
    count = len(steps)
    margin = 1.96 * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low, high = math.floor((len(slopes) - margin) / 2), math.ceil((len(slopes) + margin) / 2)
    return Growth(statistics.median(slopes), slopes[max(0, low)], slopes[min(len(slopes) - 1, high)])


def of_service(service: Service, step: int) -> Sample:
    """Reads a service and its child processes."""
    size, files, threads = 0, 0, 0
    for pid in machine.with_children(service.process.pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # of a child that has ended meanwhile
            size += machine.rss(pid)
            files += len(list(Path(f"/proc/{pid}/fd").iterdir()))
            threads += len(list(Path(f"/proc/{pid}/task").iterdir()))
    return Sample(step, size / MIB, files, threads)


def of_folder(folder: Path, step: int) -> Sample:
    """Reads a folder. A file that is removed meanwhile does not count."""
    size = files = 0
    for base, _, names in os.walk(folder):  # pathlib's rglob raises an error if a folder is removed meanwhile
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                size += Path(base, name).lstat().st_blocks * 512
                files += 1
    return Sample(step, size / MIB, files)


@contextmanager
def open_page(api_url: str) -> Iterator[None]:
    """Sends the requests of an open page and reads its events during the block. Opens the page again each minute."""
    stop = threading.Event()
    at = f"{api_url}/view/api/runs"

    def opened(client: httpx.Client) -> None:
        until = time.monotonic() + _PAGE_S
        client.get(at).raise_for_status()
        client.get(f"{at}/{_RUN}").raise_for_status()
        steps = client.get(f"{at}/{_RUN}/series?points=500&names=reward_mean,loss,entropy_mean").json()["step"]
        with client.stream("GET", f"{at}/{_RUN}/events?after={max(steps, default=0)}", timeout=_PAGE_S) as answer:
            for _ in answer.raise_for_status().iter_raw():
                if stop.is_set() or time.monotonic() > until:
                    return

    def read() -> None:
        with httpx.Client(timeout=30) as client:
            while not stop.is_set():
                opened(client)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield
        if not thread.is_alive():
            raise RuntimeError("the page could not be read; its error is above")
    finally:
        stop.set()
        thread.join(_PAGE_S)


def measure(services: Services, seconds: float) -> dict[str, list[Sample]]:
    """Trains for `seconds`, and returns the samples of each service and folder."""
    environ = services.environ() | {"GRISTMILL_RUN_ID": _RUN, "GRISTMILL_CONFIG_DIR": str(ROOT / "configs")}
    flags = [text for key, value in _SETTINGS.items() for text in ("--set", f"{key}={value}")]
    start = services.processes.start
    start("env", [sys.executable, "-m", "gristmill_env", "--config", "quickstart", *flags], environ)
    trainer = start("trainer", [sys.executable, "-m", "gristmill_trainer", "--training_steps", "1000000"], environ)
    metrics = services.folder / "runs" / _RUN / "metrics.jsonl"
    services.processes.wait_until(trainer, metrics.exists, timeout=300)
    samples: dict[str, list[Sample]] = {}
    until = time.monotonic() + seconds
    with open_page(services.api_url), metrics.open("rb") as rows:
        step = 0
        while time.monotonic() < until:
            step += rows.read().count(b"\n")
            for service in services.processes.services:
                if service.exit_code is not None:
                    raise service.failure()
                samples.setdefault(service.name, []).append(of_service(service, step))
            for name in _FOLDERS:
                samples.setdefault(f"{name}/", []).append(of_folder(services.folder / name, step))
            time.sleep(_EVERY_S)
    return samples


def main() -> None:
    parser = script.parser("soak", __doc__)
    parser.add_argument("--minutes", type=float, default=60, help="default: 60")
    options = parser.parse_args()
    facts = machine.hardware()
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder) / "services" / "runs"
        with start_services(
            Path(folder) / "services", "tiny", None, GRISTMILL_RUNS_DIR=f"{runs}", API_VIEW_DIRS=f"{runs}"
        ) as services:
            samples = measure(services, 60 * options.minutes)
    script.publish(page(facts, samples), options.results, "soak")


def page(facts: dict[str, str], samples: dict[str, list[Sample]]) -> str:
    """Returns the report."""
    steps = [sample.step for sample in next(iter(samples.values()))]
    lines = script.heading("A long run: memory, files and disk", facts)
    lines += [f"{steps[-1]:,} steps of the quickstart, with 16 groups each and an open page. Growth is per"]
    lines += [f"1,000 steps, from step {steps[len(steps) // 2]:,} on. Of a folder the files are counted.", ""]
    lines += ["| service or folder | MiB, first | half | last | MiB per 1,000 steps | interval | files, half | last |"]
    lines[-1] += " threads, half | last |"
    lines += ["|---|---|---|---|---|---|---|---|---|---|"]
    for name, of_one in samples.items():
        half = of_one[len(of_one) // 2 :]
        found = growth([one.step for one in half], [one.size for one in half])
        texts = [f"{one.size:,.1f}" for one in (of_one[0], half[0], half[-1])]
        texts += [f"{found.slope:+.2f}", f"{found.low:+.2f} to {found.high:+.2f}"]
        texts += [str(half[0].files), str(half[-1].files), str(half[0].threads or ""), str(half[-1].threads or "")]
        lines.append(f"| {name} | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
