"""The whole stack under faults. Each service is killed, stopped, restarted and cut off during one run, the connection
between each two services is cut, the disk is full, and each service's clock steps.

The seed fixes the order and the times of the faults: RESILIENCE_SEED, else a random one, which the test prints. The
progress of the services depends on the machine. `make resilience` also writes the table of docs/reliability.md.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from benchmarks import machine
from tests.support.compose import ROOT, ComposeStack
from tests.support.container_faults import Clocks, Disk, Fault, FaultyStack, Kind
from tests.support.ledger import Ledger

from gristmill import PolicyVersion, RunStatus, SyncClient, read_rollouts
from gristmill.internal.lines import read_jsonl
from gristmill.internal.metrics import METRICS_FILE
from gristmill.internal.receipts import UNPROVEN
from gristmill_env.rollouts.groups import is_version
from gristmill_trainer.checkpoint.store import read_progress
from gristmill_trainer.publish.publisher import KEPT

RUN = "resilience"
STEPS = 900
GROUPS = 16
"""Groups per step of configs/quickstart.yaml."""
SERVICES = ("redis", "api", "model", "env", "trainer")
PAIRS = (
    ("redis", "api"),
    ("api", "model"),
    ("api", "env"),
    ("api", "trainer"),
    ("model", "env"),
    ("model", "trainer"),
    ("env", "trainer"),
)
"""redis has no network, so model, env and trainer cannot reach it in any case."""
FAULTS = (
    *(Fault(kind, (name,)) for kind in (Kind.KILL, Kind.STOP, Kind.RESTART) for name in SERVICES),
    *(Fault(Kind.DISCONNECT, (name,)) for name in SERVICES if name != "redis"),
    *(Fault(Kind.CUT, pair) for pair in PAIRS),
    Fault(Kind.DISK, SERVICES),
    *(Fault(kind, (name,)) for kind in (Kind.FORWARD, Kind.BACK) for name in SERVICES),
)
SETTINGS = {"API_LEASE_TTL_S": "45", "API_PERMIT_TTL_S": "20", "API_ENV_TTL_S": "30", "API_MAX_WAIT_S": "5"}
"""Shorter than a fault can last, and longer than the heartbeats of trainer and env. Requests have 50 s at most."""
ENV_FLAGS = ["--timeout", "15", "--patience", "45", "--steps_per_eval", "0"]
LASTS_S = {Kind.STOP: 62.0, Kind.DISCONNECT: 20.0, Kind.CUT: 20.0, Kind.DISK: 15.0}
RECOVERY_S = 300.0
"""A fault after which the run does not continue within this time fails the test."""
SEED = "RESILIENCE_SEED"
PAGE = "RESILIENCE_PAGE"
"""The variable that names the page whose table the test writes."""
_POLL_S = 0.1
_TABLE = re.compile(r"(<!-- generated: resilience -->\n).*?(<!-- end of resilience -->)", re.DOTALL)


@dataclass(frozen=True)
class Look:
    """The run's state between two faults."""

    status: RunStatus
    starts: dict[str, int]
    """By service: how often Docker has started the container again because it had ended."""


@dataclass(frozen=True)
class Effect:
    """What one fault did to the run. Times in seconds."""

    fault: Fault
    lasted: float
    to_next_step: float
    """From the end of the fault to the next trained step."""
    meanwhile: int
    """Steps that were trained while the fault lasted."""
    repeated: int
    """Steps that a trainer did again, because they were after its checkpoint."""
    before: Look
    after: Look

    def row(self) -> str:
        """Returns the row of the table."""
        lasted = f"{self.lasted:.0f}" if self.fault.lasts else ""
        named = "all" if self.fault.kind is Kind.DISK else ", ".join(self.fault.services)
        return f"| {self.fault.kind} | {named} | {lasted} | {self.to_next_step:.1f} | {'; '.join(self._words())} |"

    def _words(self) -> list[str]:
        words = [f"{_count(self.meanwhile, 'step')} meanwhile"] if self.fault.lasts else []
        ended = Counter(self.after.starts) - Counter(self.before.starts)
        if self.fault.kind is Kind.KILL:
            ended -= Counter(self.fault.services)
        if ended:
            words.append(
                "restarted: " + ", ".join(name if n == 1 else f"{name} ({n} times)" for name, n in ended.items())
            )
        if self.repeated:
            words.append(f"{_count(self.repeated, 'step')} done again")
        before, after = self.before.status, self.after.status
        if delivered := after.redeliveries - before.redeliveries:
            words.append(f"{_count(delivered, 'group')} delivered again")
        dropped = Counter(after.dropped) - Counter(before.dropped)
        words += [f"{_count(count, 'row')} dropped ({reason})" for reason, count in dropped.items()]
        return words or ["none"]


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number <= 1 else 's'}"


class Run:
    """The run as its files, the API and Docker show it."""

    def __init__(self, stack: ComposeStack, disk: Disk) -> None:
        self._stack = stack
        self._metrics = disk.folder / "runs" / RUN / METRICS_FILE
        self.newest = 0
        """The newest trained step that `follow` has seen."""
        self.trained = 0
        """Steps that `follow` has seen, repeated ones included."""
        self.repeated = 0
        """Steps that a trainer removed when it resumed from its checkpoint, to do them again."""

    def follow(self, seconds: float) -> None:
        """Counts the trained steps for `seconds`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._see()
            time.sleep(_POLL_S)
        self._see()

    def next_step(self) -> float:
        """Waits until another step is trained. Returns the time.monotonic() of the step."""
        self._see()
        before, deadline = self.trained, time.monotonic() + RECOVERY_S
        while self.trained == before:
            if time.monotonic() > deadline:
                raise self._stack.late(f"a step after step {self.newest}", RECOVERY_S)
            time.sleep(_POLL_S)
            self._see()
        return time.monotonic()

    def _see(self) -> None:
        lines = self._metrics.read_bytes().splitlines(keepends=True) if self._metrics.exists() else []
        whole = [line for line in lines[-2:] if line.endswith(b"\n")]
        found = int(json.loads(whole[-1])["step"]) if whole else 0
        self.trained += max(0, found - self.newest)
        self.repeated += max(0, self.newest - found)
        self.newest = found

    def look(self) -> Look:
        with SyncClient(self._stack.api_url, patience=120) as api:
            status = api.status(RUN)
        return Look(status, {name: int(self._stack.inspect(name)["RestartCount"]) for name in SERVICES})


class Generations(threading.Thread):
    """Asks the model server for one completion after another, and keeps the labels of their weights, in order."""

    def __init__(self, url: str) -> None:
        super().__init__(name="generations", daemon=True)
        self._url = f"{url}/inference/v1/generate"
        self._closed = threading.Event()
        self.labels: list[str] = []

    def run(self) -> None:
        sampling = {"max_tokens": 4, "temperature": 1.0, "ignore_eos": True}
        body = {"model": "tiny", "token_ids": [40, 41, 42], "sampling_params": sampling}
        while not self._closed.wait(0.3):
            try:
                answer = httpx.post(self._url, json=body, timeout=10)
            except httpx.TransportError:
                continue  # The server has a fault.
            if answer.status_code == 200:
                self.labels += [span["version"] for span in answer.json()["choices"][0]["weight_versions"] or []]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Asks during the block."""
        self.start()
        try:
            yield
        finally:
            self._closed.set()
            self.join()


def _override(disk: Disk, clocks: Clocks) -> dict[str, Any]:
    services: dict[str, dict[str, Any]] = {
        name: {"environment": clocks.environment(name), "volumes": [clocks.mount()]} for name in SERVICES
    }
    flags = {"training_steps": STEPS, "checkpoint_interval": 4, "checkpoints_kept": STEPS}
    services["trainer"]["command"] = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    services["env"]["command"] = ["--config", "quickstart", *ENV_FLAGS]
    for name in ("trainer", "env"):
        services[name]["restart"] = "on-failure:1000"  # compose.yaml has ten, too few for all faults.
    return {"services": services, "volumes": disk.volumes()}


@pytest.mark.long
@pytest.mark.timeout(5400)
def test_run_survives_every_fault_of_every_service(tmp_path: Path) -> None:
    seed = int(os.environ.get(SEED) or random.SystemRandom().randrange(1 << 32))
    print(f"{SEED}={seed}")  # noqa: T201  pytest shows it if the test fails.
    rng = random.Random(seed)
    clocks = Clocks(tmp_path / "clock", SERVICES)
    override = tmp_path / "faults.yaml"
    effects: list[Effect] = []
    with Disk(tmp_path / "disk") as disk:
        override.write_text(yaml.safe_dump(_override(disk, clocks)))
        with ComposeStack(tmp_path, "gristmill-resilience", {"RUN_ID": RUN, **SETTINGS}, [override]) as stack:
            stack.up()
            faulty, run, generations = FaultyStack(stack, disk, clocks), Run(stack, disk), Generations(stack.model_url)
            with generations.watched():
                run.next_step()
                times = [run.next_step() for _ in range(6)]
                usual = statistics.median(later - earlier for earlier, later in itertools.pairwise(times))
                for number, fault in enumerate(rng.sample(FAULTS, len(FAULTS)), 1):
                    assert run.newest < STEPS, "the run ended before the faults did: raise STEPS"
                    effects.append(_effect(faulty, run, fault, rng, usual))
                    print(f"{number} of {len(FAULTS)}, step {run.newest}: {effects[-1].row()}", flush=True)  # noqa: T201
                stack.wait_for_end(timeout=1800)
            _check(stack, disk, generations.labels, tmp_path)
    if page := os.environ.get(PAGE):
        facts = machine.hardware() | {"command": "make resilience", "seed": str(seed), "usual step": f"{usual:.1f} s"}
        _write(ROOT / page, facts, effects)


def _effect(faulty: FaultyStack, run: Run, fault: Fault, rng: random.Random, usual: float) -> Effect:
    """Injects one fault at a random time within a step, and waits until the run has recovered."""
    before = run.look()
    run.next_step()
    run.follow(rng.uniform(0, usual))
    trained, repeated, began = run.trained, run.repeated, time.monotonic()
    with faulty.under(fault):
        if fault.lasts:
            run.follow(LASTS_S[fault.kind] + rng.uniform(0, 3))
        meanwhile, ended = run.trained - trained, time.monotonic()
    healed = time.monotonic() if fault.lasts else began
    to_next_step = run.next_step() - healed
    run.next_step()  # Some effects, such as groups that are delivered again, show one step later.
    return Effect(fault, ended - began, to_next_step, meanwhile, run.repeated - repeated, before, run.look())


def _check(stack: ComposeStack, disk: Disk, labels: list[str], folder: Path) -> None:
    """Checks the end of the run: its steps, its versions, every group, and the files that are left."""
    rows = read_jsonl(disk.folder / "runs" / RUN / METRICS_FILE)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    versions = [PolicyVersion.parse(row["policy_version"]) for row in rows]
    assert versions == sorted(versions)

    served = [PolicyVersion.parse(label) for label in labels if is_version(label)]
    assert served == sorted(served), "the model server went back to an earlier version"
    assert {label for label in labels if not is_version(label)} <= {"default", "invalid", UNPROVEN}
    assert len(set(served)) > STEPS / 4, "the test saw too few versions to judge"
    for group in read_rollouts(disk.folder / "rollouts" / RUN):
        for spans in group.versions:
            sampled = [PolicyVersion.parse(span.version) for span in spans]
            assert sampled == sorted(sampled), group.group_id

    with SyncClient(stack.api_url) as api:
        audit, status = api.audit(RUN), api.status(RUN)
    checkpoints = disk.folder / "runs" / RUN / "checkpoints"
    lineage = [group for path in checkpoints.iterdir() for group in read_progress(path).covered]
    acknowledged = re.findall(rf"submit run={RUN} group=(\S+)", stack.logs("api"))
    ledger = Ledger.of(acknowledged, lineage, audit)
    assert ledger.problems() == {}, ledger.counts()
    assert len(lineage) == STEPS * GROUPS
    assert sorted(lineage) == sorted(audit.trained)
    assert all(audit.dropped.values()), "a group was dropped without a reason"
    places = Counter(group for ids in ledger.places.values() for group in ids)
    # Every row that was ever handed out reached a final state.
    assert len(places) + len(audit.outstanding) == status.rows_issued

    weights = disk.folder / "weights"
    assert {path.name for path in weights.iterdir()} == {"token", RUN}
    newest = sorted(versions)[-KEPT:]
    assert {path.name for path in (weights / RUN).iterdir()} == {str(version) for version in newest}
    assert not list(checkpoints.glob(".*"))


def _write(page: Path, facts: dict[str, str], effects: list[Effect]) -> None:
    """Writes the table into the page, in the order of the kinds and services."""
    order = {fault: place for place, fault in enumerate(FAULTS)}
    lines = [*(f"- {name}: {value}" for name, value in facts.items()), ""]
    lines += ["| fault | service | lasted, s | to the next step, s | effect |", "|---|---|---|---|---|"]
    lines += [effect.row() for effect in sorted(effects, key=lambda effect: order[effect.fault])]
    text, count = _TABLE.subn(lambda found: found[1] + "\n".join(lines) + "\n" + found[2], page.read_text())
    assert count == 1, f"{page} has no place for the table"
    page.write_text(text)
