"""`gristmill doctor` and `gristmill pack` over a real run, with a real Redis, API and vLLM."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.ports import free_port
from tests.support.redis_server import RedisServer
from tests.support.stack import ROOT, Output, Vllm, start_api, start_redis

import gristmill
from gristmill import Manifest, PolicyVersion
from gristmill.view.folders import RunFolder
from gristmill_api.doctor import check_redis
from gristmill_api.settings import Settings
from gristmill_trainer.doctor import Gap, _check_version
from gristmill_trainer.publish import ModelServer, claim_publishing
from local_processes import LocalStack

PYTHON = sys.executable


def gristmill_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `gristmill` in its own process, because the services of the tests print to this one's standard output."""
    return subprocess.run([PYTHON, "-m", "gristmill", *arguments], capture_output=True, text=True, timeout=300)


def checks(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Returns the exit code of `gristmill doctor`, and each check's state by its name."""
    done = gristmill_command("doctor", *arguments, "--json")
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] is (done.returncode == 0)
    return done.returncode, {check["name"]: check["state"] for check in found["checks"]}


@pytest.fixture(scope="module")
def run(vllm: Vllm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a quickstart of six steps, with checkpoints after steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("checked")
    redis_port, api_port = free_port(), free_port()
    environ = vllm.environ(f"http://127.0.0.1:{api_port}", folder / "runs")
    with LocalStack(Output().add) as stack:
        start_redis(stack, folder / "redis", redis_port)
        start_api(stack, redis_port, api_port, GRISTMILL_RUNS_DIR=str(folder / "runs"))
        flags = ["--training_steps", "6", "--checkpoint_interval", "2"]
        services = [
            stack.start("trainer", [PYTHON, "-m", "gristmill_trainer", *flags], environ),
            stack.start("env", [PYTHON, "-m", "gristmill_env", "--config", "quickstart"], environ),
        ]
        for service in services:
            stack.wait_until(service, lambda service=service: service.exit_code is not None, timeout=240)  # type: ignore[misc]
        assert [service.exit_code for service in services] == [0, 0]
        yield folder / "runs" / "quickstart"


@pytest.fixture
def here(vllm: Vllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in vllm.environ("http://127.0.0.1:1", tmp_path / "runs", ROOT / "configs").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.timeout(900)
def test_doctor_finds_no_fault_in_the_quickstart_before_its_run(
    here: None, vllm: Vllm, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", redis_url)
    # Other tests of the session publish trained weights to this server.
    initial = Path(Manifest.read(vllm.models_dir).serve_path)
    ModelServer(vllm.url, claim_publishing(vllm.weights_dir)).publish(initial, PolicyVersion(1, 0))
    _, found = checks("--config", "quickstart")
    of_run = ["redis", "settings", "chat template", "gold answers", "rewards", f"model server {vllm.url}"]
    of_run += ["memory of trainer", "disk of trainer", "trainer and server"]
    assert {name: found[name] for name in of_run} == dict.fromkeys(of_run, "ok")


@pytest.mark.timeout(900)
def test_doctor_and_pack_of_a_real_run(here: None, run: Path, tmp_path: Path) -> None:
    code, found = checks(str(run))
    assert code == 0
    proven = [
        "archive",
        "trainer's records",
        "steps",
        "log-probabilities",
        "rewards again",
        "weights 1.0",
        "weights 1.4",
    ]
    assert {name: found[name] for name in proven} == dict.fromkeys(proven, "ok")
    path = tmp_path / "run.zip"
    assert gristmill_command("pack", str(run), "--out", str(path)).returncode == 0
    code, packed = checks(str(path))
    assert (code, packed["archive"], packed["rewards again"]) == (0, "ok", "ok")
    query = "SELECT * FROM rollouts ORDER BY group_id, sequence"
    assert gristmill.sql(path, query).to_pylist() == gristmill.sql(run, query).to_pylist()

    segment = next((RunFolder.open(path).folders[0] / "rollouts").glob("*.gmz"))
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 1
    segment.write_bytes(content)
    code, damaged = checks(str(segment.parents[1]))
    assert (code, damaged["archive"]) == (1, "failed")


@pytest.mark.parametrize(
    ("options", "state"),
    [((), "ok"), (("--appendfsync", "everysec"), "failed"), (("--maxmemory-policy", "allkeys-lru"), "failed")],
)
def test_redis_that_may_lose_groups_fails(options: tuple[str, ...], state: str) -> None:
    with RedisServer(*options) as server:
        settings = dataclasses.replace(Settings.read({}), redis_url=server.url)
        (found,) = asyncio.run(check_redis(settings))
    assert (found.name, found.state) == ("redis", state)


@pytest.mark.parametrize(
    ("own", "other", "state"),
    [(Gap(1e-6, 1e-6), 0.1, "ok"), (Gap(0.3, 1e-6), 0.3, "failed"), (Gap(0.1, 0.1), 1e-6, "failed")],
)
def test_groups_of_other_weights_fail(own: Gap, other: float, state: str) -> None:
    found = _check_version("1.4", {"1.0": Gap(other, other), "1.4": own}, 1e-3, 4)
    assert found.state == state
