"""A run on the real model servers of one name: one server is killed and returns, and another server joins late.

The servers are addresses 127.0.0.1, 127.0.0.2 and 127.0.0.3 of this machine, with the same port. The name server is a
file, because a test may not change the names of the machine.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from tests.support.ports import free_port
from tests.support.stack import ROOT, Output, Vllm, start_api, start_redis, start_vllm

from gristmill import PolicyVersion, SyncClient
from gristmill.internal.logs import line
from gristmill.internal.receipts import RECEIPTS_FILE, ReceiptState, read_receipts
from gristmill_cli.local.processes import LocalStack, Service

_WITH_NAMES = """
import runpy, sys
from pathlib import Path
from gristmill import model_servers
names, program = Path(sys.argv.pop(1)), sys.argv.pop(1)
model_servers._ask_the_system = lambda host, port: names.read_text().split()
runpy.run_module(program, run_name="__main__", alter_sys=True)
"""
_PATIENCE = 300


@pytest.mark.long
def test_run_survives_a_dead_server_and_uses_servers_that_return_or_join(vllm: Vllm, tmp_path: Path) -> None:
    output, names = Output(), tmp_path / "names"
    port = int(vllm.url.rpartition(":")[2])
    first, second, third = (f"http://127.0.0.{number}:{port}" for number in (1, 2, 3))
    names.write_text("127.0.0.1 127.0.0.2")
    with LocalStack(output.add) as stack:
        killed = start_vllm(stack, vllm.weights_dir, port, host="127.0.0.2")
        redis_port, api_port = free_port(), free_port()
        start_redis(stack, tmp_path / "redis", redis_port)
        start_api(stack, redis_port, api_port)
        api_url = f"http://127.0.0.1:{api_port}"
        places = vllm.environ(api_url, tmp_path / "runs", ROOT / "configs")
        places["GRISTMILL_MODEL_URL"] = f"dns+http://model:{port}"

        def start(name: str, *arguments: str) -> Service:
            program = [sys.executable, "-c", _WITH_NAMES, str(names), f"gristmill_{name}", *arguments]
            return stack.start(name, program, places)

        env = start("env", "--config", "quickstart", "--steps_per_eval", "0")
        trainer = start("trainer", "--training_steps", "5000")
        receipts = tmp_path / "runs" / "quickstart" / RECEIPTS_FILE

        def wait(condition: Callable[[], bool]) -> None:
            stack.wait_until(trainer, condition, timeout=_PATIENCE)

        def step() -> int:
            version = api.get_run("quickstart").version
            return -1 if version is None else PolicyVersion.parse(version).step

        def wait_for_steps(number: int) -> int:
            """Waits until this many more steps are published. Returns the last."""
            reached = step() + number
            wait(lambda: step() >= reached)
            return reached

        def wait_for_work_at(url: str, at_least: int) -> None:
            """Waits for an ok receipt of the server, of version `at_least` or newer, and for completions by it."""
            wait(lambda: _proven(receipts, url) >= at_least)
            before = _completed(url)
            wait(lambda: _completed(url) > before)

        with SyncClient(api_url) as api:
            wait(lambda: _exists(api))
            wait(lambda: step() >= 1)
            wait_for_work_at(second, 1)

            os.killpg(killed.process.pid, signal.SIGKILL)
            killed.process.wait()
            wait_for_steps(3)

            start_vllm(stack, vllm.weights_dir, port, host="127.0.0.2")
            wait_for_work_at(second, step())

            start_vllm(stack, vllm.weights_dir, port, host="127.0.0.3")
            names.write_text("127.0.0.1 127.0.0.2 127.0.0.3")
            wait_for_work_at(third, step())
            reached = wait_for_steps(2)

            trainer.process.send_signal(signal.SIGTERM)
            stack.wait_until(trainer, lambda: trainer.exit_code is not None, timeout=_PATIENCE)
            dropped = api.status("quickstart").dropped
        assert env.exit_code is None, "the environment ended with a model server"
    # A completion of a server that has not loaded the newest version yet is stale.
    assert set(dropped) <= {"stale"}
    rows = [row for row in read_receipts(receipts) if row.state is ReceiptState.OK]
    assert {row.server for row in rows} == {first, second, third}
    assert {row.version for row in rows if row.server == first} >= {f"1.{step}" for step in range(1, reached)}
    assert not [row for row in read_receipts(receipts) if row.state is ReceiptState.FAILED]
    for service in ("trainer", "env"):
        text = output.of(service)
        assert line("model server", state="away", url=second) in text
        assert line("model server", state="up", url=second) in text
        assert line("model server", state="joined", url=third) in text


def _exists(api: SyncClient) -> bool:
    return any(run.run_id == "quickstart" for run in api.list_runs())


def _proven(receipts: Path, url: str) -> int:
    """Returns the newest step whose weights the server has proven to serve; -1 without such a step."""
    rows = read_receipts(receipts)
    return max((row.step for row in rows if row.server == url and row.state is ReceiptState.OK), default=-1)


def _completed(url: str) -> float:
    """Returns the number of requests that the server has completed."""
    text = httpx.get(f"{url}/metrics", timeout=60).text
    return sum(float(row.split()[-1]) for row in text.splitlines() if row.startswith("vllm:request_success_total"))
