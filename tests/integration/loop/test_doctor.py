"""`gristmill doctor` and `gristmill pack` over a real run, with a real Redis, API and vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.ports import free_port
from tests.support.stack import MODELS_DIR, ROOT, VLLM_PYTHON, Output, Vllm, start_api, start_redis

from gristmill import Manifest, PolicyVersion
from gristmill_cli.local.processes import LocalStack, answers
from gristmill_model import server
from gristmill_model.settings import Settings as ModelSettings
from gristmill_trainer.doctor import made_up_probes
from gristmill_trainer.publish.publisher import claim_publishing
from gristmill_trainer.publish.servers import ModelServer
from gristmill_trainer.receipts.diagnosis import Cause
from gristmill_trainer.receipts.probes import served_scores
from gristmill_view import sql
from gristmill_view.pack import open_run

PYTHON = sys.executable


def gristmill_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `gristmill` in its own process, because the services of the tests print to this one's standard output."""
    return subprocess.run([PYTHON, "-m", "gristmill_cli", *arguments], capture_output=True, text=True, timeout=300)


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


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.timeout(900)
def test_doctor_and_pack_of_a_real_run(here: None, run: Path, tmp_path: Path) -> None:
    code, found = checks(str(run))
    assert code == 0
    proven = [
        "archive",
        "trainer's records",
        "steps",
        "log-probabilities",
        "publications",
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
    assert sql(path, query).to_pylist() == sql(run, query).to_pylist()

    segment = next((open_run(path).folders[0] / "rollouts").glob("*.gmz"))
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 1
    segment.write_bytes(content)
    code, damaged = checks(str(segment.parents[1]))
    assert (code, damaged["archive"]) == (1, "failed")


def _has_rounded_logits(server: ModelServer) -> bool:
    """Whether the logits of a server are numbers of bfloat16, whose differences are multiples of 2^-9 if no logit is
    below 1/2."""
    (scores,) = served_scores(server, made_up_probes(256, 1.0).each_time())
    steps = (scores.sampled - scores.sampled[0]) * 2.0**9
    return bool(np.abs(steps - steps.round()).max() < 0.05)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("setting", "cause"),
    [
        (["--logprobs-mode", "raw_logprobs"], Cause.RAW),
        (["--dtype", "bfloat16"], Cause.DTYPE),
    ],
)
def test_vllm_with_other_settings_fails_with_the_cause(
    here: None, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: list[str], cause: Cause
) -> None:
    """The model service refuses such settings, so vLLM is started as by hand.

    vLLM's own top_k and top_p act only on requests with text, so another test has a server of torch with this fault.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    monkeypatch.setenv("REDIS_URL", redis_url)
    monkeypatch.setenv("GRISTMILL_MODEL_URL", url)
    settings = ModelSettings.read(
        {"MODEL_PORT": str(port), "GRISTMILL_WEIGHTS_DIR": str(tmp_path / "weights")}, cuda_available=False
    )
    manifest = Manifest.read(MODELS_DIR)
    _, *options = server.arguments(settings, manifest)
    with LocalStack(Output().add) as stack:
        environ = server.environment(settings, manifest, None, {})
        vllm = stack.start("model", [str(VLLM_PYTHON), *options, *setting], environ)
        stack.wait_until(vllm, lambda: answers(f"{url}/health"), timeout=900)
        done = gristmill_command("doctor", "--config", "quickstart", "--json")
        if cause is Cause.DTYPE:
            assert not _has_rounded_logits(ModelServer(url))
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 1
    assert found["trainer and server"]["state"] == "failed"
    assert f"[{cause}]" in found["trainer and server"]["text"]
    assert found[f"model server {url}"]["state"] == "ok", "it samples with the temperature"
