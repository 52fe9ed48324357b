"""Seconds from the kill of a service to the next trained step: `make bench ARGS=recovery`.

Trains the quickstart with two real model servers, and a checkpoint every two steps. Kills one service with SIGKILL in
the middle of a step, and starts it again at once, as Docker's restart policy does. A killed model server stays dead
until the next step is measured: the other server must suffice. The environment takes the name of the killed process at
the API, and gives back its permits.

A step is trained when its row is in the trainer's metrics.jsonl. The standstill is the time from the kill to this row,
less the half step that was left. The usual step is the median of the steps before the kill, with both model servers. So
the standstill after the kill of a model server includes that the other server needs longer for the same rollouts.
"""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks import machine, script
from tests.support.ports import free_port
from tests.support.stack import ROOT, VLLM_PYTHON, Output, environ, start_api, start_redis, start_vllm

from gristmill.internal.lines import read_jsonl
from gristmill.internal.metrics import METRICS_FILE
from gristmill.internal.receipts import RECEIPTS_FILE, ReceiptState, read_receipts
from gristmill_cli.local.processes import LocalStack, Service
from gristmill_cli.local.redis_server import redis_command

_CONFIG = "quickstart"
_POLL = 0.01
_PATIENCE = 600.0


@dataclass(frozen=True)
class Target:
    """The limit that the project sets for a service, in seconds."""

    seconds: float
    standstill: bool = False
    """Whether the limit is for the standstill, not for the time to the next step."""


TARGETS = {
    "trainer": Target(30),
    "env": Target(10),
    "api": Target(5),
    "redis": Target(10),
    "model": Target(2, standstill=True),
}


@dataclass(frozen=True)
class Kill:
    """One kill of one service. All values in seconds."""

    to_next_step: float
    usual_step: float

    @property
    def standstill(self) -> float:
        """How much later than usual the next step came, at least 0. The kill came in the middle of a step."""
        return max(0.0, self.to_next_step - self.usual_step / 2)


class Run:
    """A quickstart on real services that can be killed and started again."""

    def __init__(self, stack: LocalStack, folder: Path) -> None:
        self._stack = stack
        self._folder = folder
        self._redis_port, self._api_port = free_port(), free_port()
        self._model_ports = [free_port(), free_port()]
        urls = [f"http://127.0.0.1:{port}" for port in self._model_ports]
        self._killed_url = urls[1]
        (folder / "weights").mkdir(parents=True)
        api_url = f"http://127.0.0.1:{self._api_port}"
        self._places = environ(api_url, ",".join(urls), folder / "runs", ROOT / "configs", folder / "weights")
        self._services = {
            "redis": start_redis(stack, folder / "redis", self._redis_port),
            "api": start_api(stack, self._redis_port, self._api_port),
        }
        start_vllm(stack, folder / "weights", self._model_ports[0])
        self._services["model"] = start_vllm(stack, folder / "weights", self._model_ports[1])
        self.start("env")
        self.start("trainer")

    def start(self, name: str) -> None:
        """Starts a service, and does not wait until it is ready."""
        commands = {
            "redis": redis_command(self._redis_port, self._folder / "redis"),
            "api": [
                *(sys.executable, "-m", "gristmill_api"),
                *("--host", "127.0.0.1", "--port", str(self._api_port)),
            ],
            "model": [str(VLLM_PYTHON), "-m", "gristmill_model"],
            "env": [sys.executable, "-m", "gristmill_env", "--config", _CONFIG, "--steps_per_eval", "0"],
            "trainer": [
                *(sys.executable, "-m", "gristmill_trainer"),
                *("--training_steps", "100000", "--checkpoint_interval", "2"),
            ],
        }
        variables = {
            "api": {"REDIS_URL": f"redis://127.0.0.1:{self._redis_port}/0"},
            "model": {"MODEL": "tiny", "MODEL_PORT": str(self._model_ports[1])},
        }
        self._services[name] = self._stack.start(name, commands[name], self._places | variables.get(name, {}))

    def kill(self, name: str) -> None:
        """Kills a service and all of its processes."""
        process = self._services[name].process
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def step(self) -> int:
        """Returns the newest trained step; 0 before the first."""
        path = self._folder / "runs" / _CONFIG / METRICS_FILE
        rows = read_jsonl(path) if path.exists() else []
        return int(rows[-1]["step"]) if rows else 0

    def next_step(self) -> float:
        """Waits until another step is trained. Returns the time.monotonic() of the step.

        A trainer that resumes first removes the rows after its checkpoint, so a lower step is not a trained step.
        """
        before = self.step()

        def trained() -> bool:
            nonlocal before
            earlier, before = before, self.step()
            return before > earlier

        self._wait(trained)
        return time.monotonic()

    def usual_step(self, steps: int) -> float:
        """Returns the median time of the next `steps` steps."""
        times = [self.next_step() for _ in range(steps + 1)]
        return statistics.median(later - earlier for earlier, later in itertools.pairwise(times))

    def wait_for_model(self) -> None:
        """Waits until the server that is killed has proven to serve the weights of a new step."""
        reached = self.step()
        receipts = self._folder / "runs" / _CONFIG / RECEIPTS_FILE
        self._wait(
            lambda: any(
                row.server == self._killed_url and row.state is ReceiptState.OK and row.step > reached
                for row in read_receipts(receipts)
            )
        )

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not condition():
            for service in self._services.values():
                if service.exit_code is not None and service.exit_code != -signal.SIGKILL:
                    raise service.failure()
            if time.monotonic() > deadline:
                raise self._trainer().late(_PATIENCE)
            time.sleep(_POLL)

    def _trainer(self) -> Service:
        return self._services["trainer"]


def measure(run: Run, name: str, steps: int) -> Kill:
    """Kills the service in the middle of a step, and waits until the run has recovered. `steps`: for the usual time."""
    usual = run.usual_step(steps)
    time.sleep(usual / 2)
    run.kill(name)
    killed = time.monotonic()
    if name != "model":
        run.start(name)
    to_next_step = run.next_step() - killed
    if name == "model":
        run.start(name)
        run.wait_for_model()
    return Kill(to_next_step, usual)


def main() -> None:
    parser = script.parser("recovery", __doc__)
    parser.add_argument("--kills", type=int, default=5, help="of each service; default: 5")
    parser.add_argument("--steps", type=int, default=4, help="steps for the usual time before a kill; default: 4")
    parser.add_argument("--services", nargs="+", choices=list(TARGETS), default=list(TARGETS), help="default: all")
    options = parser.parse_args()
    facts = machine.hardware()
    output = Output()
    kills: dict[str, list[Kill]] = {name: [] for name in options.services}
    with tempfile.TemporaryDirectory() as folder, LocalStack(lambda name, text: output.lines.append(text)) as stack:
        run = Run(stack, Path(folder) / "run")
        run.next_step()
        run.wait_for_model()
        for _ in range(options.kills):
            for name in options.services:
                kills[name].append(measure(run, name, options.steps))
                script.say(f"{name}: {kills[name][-1]}")
    page = _page(facts, kills)
    script.publish(page, options.results, "recovery")


def _page(facts: dict[str, str], kills: dict[str, list[Kill]]) -> str:
    lines = script.heading("From the kill of a service to the next trained step", facts)
    lines += ["Seconds. Standstill: how much later than usual the next step came.", ""]
    lines += [
        "| killed | kills | to the next step, median | longest | usual step | standstill, median | longest | target |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for name, of_service in kills.items():
        times, still = [kill.to_next_step for kill in of_service], [kill.standstill for kill in of_service]
        target = TARGETS[name]
        texts = [f"{statistics.median(times):.1f}", f"{max(times):.1f}"]
        texts += [f"{statistics.median(kill.usual_step for kill in of_service):.1f}"]
        texts += [f"{statistics.median(still):.1f}", f"{max(still):.1f}"]
        limit = f"{'standstill' if target.standstill else 'next step'} ≤ {target.seconds:g}"
        shown = "one of two model servers" if name == "model" else name
        lines.append(f"| {shown} | {len(of_service)} | {' | '.join(texts)} | {limit} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
