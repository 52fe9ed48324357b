"""The page of the runs: what open pages cost the API, the bytes of the page, and the time until it is painted.

    submits  submits per second through the API and its processor time, with three open pages and without, in turn; and
             the API's processor time with three pages and no other work. An open page here is a client that sends the
             requests of a page and reads its events: three browsers would take the processor from the server. The
             requests of a page in Chromium are counted to show that they are the same. Redis does not wait for the
             disk, whose speed varies more than the API's: the share of the pages is then larger, not smaller
    slow     the same with 20 open pages and a Redis whose answers come 200 ms late: submits per second, and the groups
             per second that the archive writes
    paint    a run of 10,000 steps in Chromium, from `gristmill view` on loopback with an empty cache: bytes on the
             wire, the first paint, and the time until all curves are drawn

`python -m benchmarks page [submits|slow|paint] [--rounds N] [--results FOLDER]`
"""

from __future__ import annotations

import contextlib
import http.server
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from benchmarks import machine, script
from benchmarks.api.clients import Http, load
from benchmarks.api.interfaces import BATCH_GROUPS, NativeInterface
from benchmarks.api.payloads import Shape, make
from benchmarks.api.servers import LIMITS, Uvicorn
from tests.support.chromium import Seen, chromium, new_page, settled
from tests.support.demo_runs import DemoSource
from tests.support.fault_proxy import Fault, FaultProxy, Way
from tests.support.redis_server import RedisServer

from gristmill import SyncClient, read_rollouts
from gristmill_cli.local.processes import answers, free_port

PAGES, STEPS, HISTORY = 3, 10_000, 1_000
MANY, SLOW_GROUPS, LATE_S = 20, 128, 0.2
SHAPE, GROUPS = Shape(8, 1024), 1024
"""Submits of one block."""
NAMES = (
    "reward_mean,reward_std,reward_parts.*,completion_tokens_mean,zero_advantage_share,cut_off_share,"
    "rollout_logprob_diff_max,rollout_logprob_diff_mean,loss,entropy_mean,kl_rollout,kl_ref,ratio.p99,ratio.p50,"
    "ratio.p01,clip_high_share,clip_low_share,grad_norm,staleness_mean,tokens_per_second,learning_rate,memory_mb"
)
IDLE_S, SETTLE_S = 30.0, 3.0
RUN = "bench-page"
_FORK = multiprocessing.get_context("fork")


def rows(steps: int) -> list[dict[str, Any]]:
    """Returns rows of metrics as the trainer writes them, with the names that the page draws."""
    import asyncio

    flat = asyncio.run(DemoSource().news("long", STEPS - 2))["steps"][-1]
    row: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = name.split(".")
        place = row
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    noise = np.random.default_rng(0)

    def moved(values: Any) -> Any:
        if isinstance(values, dict):
            return {name: moved(value) for name, value in values.items()}
        return values * float(noise.normal(1, 0.05)) if isinstance(values, float) else values

    return [
        moved(row) | {"step": step, "reward_mean": 0.2 + 0.7 * step / steps, "loss": step % 7 / 70}
        for step in range(1, steps + 1)
    ]


# --- Submits ---------------------------------------------------------------------------------------------------
@dataclass
class Blocks:
    """The measurements of the blocks of one kind."""

    rates: list[float] = field(default_factory=list)
    """Groups per second."""
    cpu: list[float] = field(default_factory=list)
    """Processor seconds per group of the API's processes."""


class _Served(http.server.BaseHTTPRequestHandler):
    """A model server, as far as the page asks one."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = json.dumps({"weight_version": "1.0", "is_paused": False}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@contextlib.contextmanager
def in_process(work: Any, *arguments: object) -> Iterator[None]:
    """Runs `work` in a separate process until the block ends."""
    process = _FORK.Process(target=work, args=arguments, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join()


def serve_model(port: int) -> None:
    http.server.ThreadingHTTPServer(("127.0.0.1", port), _Served).serve_forever()


def report_steps(port: int, interface: NativeInterface, first: int) -> None:
    """Reports a step per second, as a trainer does."""
    row = rows(1)[0]
    with SyncClient(f"http://127.0.0.1:{port}", patience=60) as client:
        for step in range(first, first + 1_000_000):
            client.report_metrics(interface.run_id, "trainer", step, row | {"step": step})
            time.sleep(1)


def watch(url: str, run: str, pages: int = PAGES) -> None:
    """Does what an open page does, and reads its events until the process ends."""
    at = f"{url}/view/api/runs/{run}"

    def one() -> None:
        with httpx.Client(timeout=None) as client:
            client.get(f"{url}/view/api/runs")
            client.get(at)
            last = client.get(f"{at}/series?points=500&names={NAMES}").json()["step"][-1]
            with client.stream("GET", f"{at}/events?after={last}") as stream:
                for _ in stream.iter_raw():
                    pass

    threads = [threading.Thread(target=one, daemon=True) for _ in range(pages)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def requests_of_a_page(url: str, run: str) -> list[str]:
    """Returns the requests for data that a page in Chromium sends in ten seconds."""
    seen = Seen()
    with chromium() as browser:
        page = new_page(browser, seen)
        page.goto(f"{url}/view/{run}")
        settled(page)
        page.wait_for_timeout(10_000)
        page.context.close()
    return [asked.removeprefix(url) for asked in seen.asked if "/view/api/" in asked]


def submits(rounds: int) -> list[str]:
    """Returns the cost of open pages."""
    blocks = {False: Blocks(), True: Blocks()}
    with tempfile.TemporaryDirectory() as folder, RedisServer("--appendfsync", "no") as redis:
        model = free_port()
        environ = {
            "REDIS_URL": redis.url, **LIMITS, "API_VIEW_DIRS": folder, "API_VIEW_SERVERS": f"http://127.0.0.1:{model}",
        }  # fmt: skip
        api = Uvicorn(Path(sys.executable), "gristmill_api.app:app", "/readyz", environ)
        with api, in_process(serve_model, model):
            url = f"http://127.0.0.1:{api.port}"
            native = NativeInterface(api.port, SHAPE, RUN)
            native.open()
            with SyncClient(url, patience=60) as client:
                for row in rows(HISTORY):
                    client.report_metrics(RUN, "trainer", row["step"], row)
            payloads = [make(SHAPE, seed) for seed in range(16)]
            asked = requests_of_a_page(url, RUN)  # and the process that reads files has begun
            with in_process(report_steps, api.port, native, HISTORY + 1):
                for number in range(rounds):
                    for pages in (True, False) if number % 2 else (False, True):
                        with in_process(watch, url, RUN) if pages else contextlib.nullcontext():
                            requests = native.prepare(payloads, GROUPS)
                            time.sleep(SETTLE_S)
                            before = cpu(api.pid)
                            done = load(requests, api.port)
                            blocks[pages].cpu.append((cpu(api.pid) - before) / GROUPS)
                            blocks[pages].rates.append(GROUPS / done.seconds)
                            rate = blocks[pages].rates[-1]
                            script.say(f"{number + 1}/{rounds}, {PAGES if pages else 0} pages: {rate:.1f} groups/s")
                idle = {}
                for pages in (False, True):
                    with in_process(watch, url, RUN) if pages else contextlib.nullcontext():
                        time.sleep(SETTLE_S)
                        before = cpu(api.pid)
                        time.sleep(IDLE_S)
                        idle[pages] = (cpu(api.pid) - before) / IDLE_S
            native.close()
    return submit_lines(blocks, idle, asked, rounds)


def submit_lines(
    blocks: Mapping[bool, Blocks], idle: Mapping[bool, float], asked: Sequence[str], rounds: int
) -> list[str]:
    """Returns the tables."""
    lines = [
        f"{rounds} blocks of {GROUPS} submits of {SHAPE.name} tokens by 16 clients with each number of pages, in turn. "
        "The difference is the median over pairs of blocks that follow each other, with the middle half of the pairs. "
        "A step is reported per second, and the API asks one model server for the page.",
        "",
        f"| | no page | {PAGES} pages | difference | middle half |",
        "|---|---|---|---|---|",
    ]
    without, with_pages = blocks[False], blocks[True]
    for title, scale, digits, pairs in (
        ("submits, groups per second", 1.0, 1, list(zip(without.rates, with_pages.rates, strict=True))),
        ("API's processor time, ms per group", 1000.0, 3, list(zip(without.cpu, with_pages.cpu, strict=True))),
    ):
        ratios = sorted((other / one - 1) * 100 for one, other in pairs)
        low, high = (ratios[0], ratios[-1]) if len(ratios) < 4 else statistics.quantiles(ratios, n=4)[::2]
        one, other = (statistics.median(column) * scale for column in zip(*pairs, strict=True))
        lines.append(
            f"| {title} | {one:,.{digits}f} | {other:,.{digits}f} | {statistics.median(ratios):+.1f} % | "
            f"{low:+.1f} to {high:+.1f} % |"
        )
    extra = (idle[True] - idle[False]) * 100
    return [
        *lines,
        "",
        f"Without submits, over {IDLE_S:.0f} s: the API takes {idle[False] * 100:.2f} % of a core without a page and "
        f"{idle[True] * 100:.2f} % with {PAGES}: {extra:+.2f} % of a core for the pages. This counts all processes of "
        "the API.",
        "",
        "Requests for data of one page in Chromium in its first ten seconds:",
        "",
        *(f"- `{path.partition('&names=')[0]}`" for path in asked),
    ]


# --- Slow Redis ------------------------------------------------------------------------------------------------
def slow(rounds: int) -> list[str]:
    """Returns what many open pages cost submits and the archive if each command of Redis takes long."""
    rates: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    with (
        tempfile.TemporaryDirectory() as folder,
        RedisServer("--appendfsync", "no") as redis,
        FaultProxy(redis.port) as proxy,
    ):
        url = redis.url.replace(f":{redis.port}", f":{proxy.port}")
        environ = {"REDIS_URL": url, **LIMITS, "GRISTMILL_RUNS_DIR": folder}
        with Uvicorn(Path(sys.executable), "gristmill_api.app:app", "/readyz", environ) as api:
            native = NativeInterface(api.port, SHAPE, RUN)
            native.open()
            with SyncClient(f"http://127.0.0.1:{api.port}", patience=60) as client:
                client.report_metrics(RUN, "trainer", 1, rows(1)[0])
            payloads = [make(SHAPE, seed) for seed in range(16)]
            for number in range(rounds):
                for pages in (True, False) if number % 2 else (False, True):
                    requests = native.prepare(payloads, SLOW_GROUPS)
                    watching = in_process(watch, f"http://127.0.0.1:{api.port}", RUN, MANY)
                    with (
                        proxy.under(Fault(answer=Way(delay_s=LATE_S))),
                        watching if pages else contextlib.nullcontext(),
                    ):
                        time.sleep(SETTLE_S)
                        rates[pages].append(block(native, requests, Path(folder) / RUN))
                    said = ", ".join(f"{rate:.1f}" for rate in rates[pages][-1])
                    script.say(f"{number + 1}/{rounds}, {MANY if pages else 0} pages: {said} groups/s")
            native.close()
    lines = [
        f"{rounds} blocks of {SLOW_GROUPS} groups of {SHAPE.name} tokens with each number of pages, in turn. Redis "
        f"answers each command {LATE_S * 1000:.0f} ms late. 16 clients submit; then one client leases and acks batches "
        "of 8 groups until the archive has all. Medians, and their ratio.",
        "",
        f"| groups per second | no page | {MANY} pages | ratio |",
        "|---|---|---|---|",
    ]
    for place, title in enumerate(("submits", "leases, acks and the archive")):
        one, other = (statistics.median(pair[place] for pair in rates[pages]) for pages in (False, True))
        lines.append(f"| {title} | {one:.2f} | {other:.2f} | {other / one:.2f} |")
    return lines


def block(native: NativeInterface, requests: Sequence[Any], run: Path) -> tuple[float, float]:
    """Submits, leases and acks the groups. Returns the groups per second of the submits, and of the rest until the last
    group is in the archive."""
    done = load(requests, native.port)
    before = sum(1 for _ in read_rollouts(run)) if (run / "rollouts").exists() else 0
    http, began = Http(native.port), time.monotonic()
    for _ in range(SLOW_GROUPS // BATCH_GROUPS):
        native.draw(http)
        native.settle(http)
    http.close()
    while sum(1 for _ in read_rollouts(run)) < before + SLOW_GROUPS:
        time.sleep(0.05)
    return SLOW_GROUPS / done.seconds, SLOW_GROUPS / (time.monotonic() - began)


def cpu(pid: int) -> float:
    return machine.cpu_seconds(*machine.with_children(pid))


# --- Paint -----------------------------------------------------------------------------------------------------
def paint(rounds: int) -> list[str]:
    """Returns bytes and times of the page of a long run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "long"
        folder.mkdir()
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(STEPS)))
        size = (folder / "metrics.jsonl").stat().st_size
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        server = subprocess.Popen(
            [sys.executable, "-m", "gristmill_cli", "view", str(folder), "--port", str(port)], stdout=subprocess.DEVNULL
        )
        try:
            while not answers(f"{url}/view"):
                if server.poll() is not None:
                    raise RuntimeError("gristmill view did not start")
                time.sleep(0.1)
            with chromium() as browser:
                loads = [loaded(browser, f"{url}/view/long") for _ in range(rounds + 1)]
            packed = transferred(f"{url}/view/api/runs/long/series?points=500&names={NAMES}")
        finally:
            server.terminate()
            server.wait()
    first, rest = loads[0], loads[1:]
    return [
        f"A run of {STEPS:,} steps ({size / 1e6:.1f} MB of metrics), {rounds} loads with an empty cache each, after a "
        "first one for which the server read the metrics.",
        "",
        "| | first load | median | slowest |",
        "|---|---|---|---|",
        *(
            f"| {title} | {first[key]:.2f} s | {statistics.median(one[key] for one in rest):.2f} s | "
            f"{max(one[key] for one in rest):.2f} s |"
            for title, key in (("first paint", "paint"), ("all curves are drawn", "drawn"))
        ),
        "",
        "| bytes on the wire | kB |",
        "|---|---|",
        f"| the page: HTML, scripts, styles, icon | {rest[0]['files'] / 1000:.1f} |",
        f"| its data: overview and curves of {STEPS:,} steps | {rest[0]['data'] / 1000:.1f} |",
        f"| of these the curves | {packed / 1000:.1f} |",
        f"| together | {(rest[0]['files'] + rest[0]['data']) / 1000:.1f} |",
    ]


def loaded(browser: Any, address: str) -> dict[str, float]:
    """Loads the page in a fresh context. Returns seconds and bytes."""
    page = new_page(browser, Seen())
    page.set_default_timeout(60_000)
    session = page.context.new_cdp_session(page)
    session.send("Network.enable")
    addresses: dict[str, str] = {}
    sizes: dict[str, float] = {}
    session.on(
        "Network.requestWillBeSent", lambda event: addresses.update({event["requestId"]: event["request"]["url"]})
    )
    session.on("Network.loadingFinished", lambda event: sizes.update({event["requestId"]: event["encodedDataLength"]}))
    began = time.perf_counter()
    page.goto(address)
    settled(page)
    drawn = time.perf_counter() - began
    painted = page.evaluate("() => performance.getEntriesByName('first-contentful-paint')[0].startTime") / 1000
    page.wait_for_timeout(300)
    page.context.close()
    data = sum(size for key, size in sizes.items() if "/view/api/" in addresses[key])
    return {"paint": painted, "drawn": drawn, "files": sum(sizes.values()) - data, "data": data}


def transferred(address: str) -> int:
    """Returns the bytes of an answer's body as a browser receives it."""
    with urllib.request.urlopen(urllib.request.Request(address, headers={"Accept-Encoding": "gzip"})) as answer:
        return len(answer.read())


def main() -> None:
    parser = script.parser("page", __doc__)
    parser.add_argument("what", nargs="*", choices=["submits", "slow", "paint", []], help="default: all")
    parser.add_argument("--rounds", type=int, default=20, help="default: 20")
    options = parser.parse_args()
    lines = script.heading("The page", machine.hardware())
    if not options.what or "submits" in options.what:
        lines += ["## Three open pages", "", *submits(options.rounds), ""]
    if not options.what or "slow" in options.what:
        lines += ["## Many pages and a slow Redis", "", *slow(max(1, options.rounds // 4)), ""]
    if not options.what or "paint" in options.what:
        lines += ["## Paint and bytes", "", *paint(max(3, options.rounds // 2)), ""]
    script.publish("\n".join(lines), options.results, "page-slow" if options.what == ["slow"] else "page")


if __name__ == "__main__":
    main()
