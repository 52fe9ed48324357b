"""The launcher: one command runs a whole training, and leaves nothing behind."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import pytest
import yaml
from tests.support.held_out import exact_match
from tests.support.launcher import SCRIPT, Terminal, launch, launch_command
from tests.support.ports import free_port
from tests.support.stack import MODELS_DIR, ROOT, Vllm, start_vllm

from gristmill import Manifest, PolicyVersion, read_rollouts
from gristmill.archive.run_file import read_run_file
from gristmill.internal.lines import read_jsonl
from gristmill.internal.receipts import RECEIPTS_FILE, read_receipts
from gristmill_cli.local.processes import LocalStack, listens
from gristmill_trainer.policy import ModelSource, Policy
from gristmill_trainer.publish.pool import ModelServers
from gristmill_trainer.publish.publisher import FilesystemTransport, claim_publishing
from gristmill_trainer.publish.servers import ModelServer
from gristmill_view.facts import read_files

FILES = {
    "metrics.jsonl", "checkpoints", "digests.jsonl", "probes.json", "receipts.jsonl", "model", "trained", "rollouts",
    "evaluations", "logs", "run.json", "report.html",
}  # fmt: skip
"""Files of a finished local run. A run that dropped a group has drops.jsonl too."""

HARMLESS = ("Failed to load weights", "nanobind", "leaked")
"""What vLLM prints without a fault."""


def _descendants(pid: int) -> set[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    found = {int(child) for child in children.read_text().split()} if children.exists() else set()
    return found | {grandchild for child in found for grandchild in _descendants(child)}


def test_output_without_a_terminal_is_one_line_per_step_and_a_summary(tmp_path: Path) -> None:
    """The launcher starts vLLM too, publishes into it and stops it, and hides vLLM's harmless errors."""
    (tmp_path / "state").mkdir()
    MODELS_DIR.mkdir(parents=True, exist_ok=True)
    (tmp_path / "state" / "models").symlink_to(MODELS_DIR)
    command = [sys.executable, str(SCRIPT), "--training_steps", "3", "--runs_dir", str(tmp_path / "runs")]
    command += [f"--api_port={free_port()}", f"--model_port={free_port()}", f"--state_dir={tmp_path / 'state'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    lines = output.splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("step ")] == ["step 1/3", "step 2/3", "step 3/3"]
    assert len(lines) <= 50, output
    assert "\x1b" not in output
    assert not any(" | " in line for line in lines), output
    folder = tmp_path / "runs" / "quickstart"
    services = ("redis", "model", "api", "env", "trainer")
    assert {path.name for path in (folder / "logs").iterdir()} == {"lock", *(f"{name}.log" for name in services)}
    for text in ("Traceback", "ERROR", *HARMLESS):
        assert text not in output
    log = (folder / "logs" / "model.log").read_text()
    for text in HARMLESS:
        assert text in log, "if vLLM has stopped printing it, the launcher need not know it"
    assert {path.name for path in folder.iterdir() if not path.name.startswith(".")} - {"drops.jsonl"} == FILES
    _check_run_file_and_report(folder)
    _check_summary(output, folder)
    evaluated = [row["step"] for row in _evaluations(folder)]
    assert evaluated == [0, 3], "the quickstart evaluates before and after"


def _check_run_file_and_report(folder: Path) -> None:
    """Checks the files with the settings and the report of a finished run of three steps."""
    record = read_run_file(folder / "run.json")
    assert (record.state, record.version, record.training_steps) == ("finished", "1.3", 3)
    trainer = record.trainer or {}
    assert {"seed", "objective", "batch_size", "gradient_accumulation_steps", "learning_rate"} <= {*trainer}
    assert record.env["model"]
    report = (folder / "report.html").read_text(encoding="utf-8")
    assert re.findall(r"step (\d+)</span>", report.split("<h2>Samples")[1]) == ["1", "2", "3"]
    assert "200 prompts" in report
    assert "trainer.learning_rate" in report


def _evaluations(folder: Path) -> list[Mapping[str, Any]]:
    """Returns the evaluations in the files of a run, each of 200 prompts."""
    found = list(read_files(folder.name, [folder.parent]).evaluations)
    assert [row["prompts"] for row in found] == [200] * len(found)
    return found


def _check_summary(output: str, folder: Path) -> None:
    """Checks the end of the output of three steps."""
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output)
    end = plain[plain.index("run quickstart is finished: 3 steps in ") :]
    rewards = [row["reward_mean"] for row in read_jsonl(folder / "metrics.jsonl")]
    assert f"{rewards[0]:.3f} → {rewards[-1]:.3f}" in end
    assert re.search(r"held-out accuracy +\d+\.\d % → \d+\.\d %  \(200 prompts", end), end
    assert "48 trained, none dropped" in end
    samples = re.findall(r"^ .* (?:1\.00|0\.20|0\.00|0\.80)  What is \d+ \+ \d\?  →  ", end, re.MULTILINE)
    assert len(samples) == 3, end
    for part in (
        str(folder / "model"),
        str(folder / "report.html"),
        "--training_steps 6",
        f"gristmill --runs {folder.parent} evaluate quickstart",
    ):
        assert part in end, end
    assert end.splitlines()[-1].startswith("run quickstart is finished; ")


@pytest.mark.long
def test_terminal_shows_a_live_view_and_then_the_summary(vllm: Vllm, tmp_path: Path) -> None:
    command, _ = launch_command(tmp_path, vllm, "--training_steps", "3")
    terminal = Terminal(command)
    code, shown = terminal.wait(timeout=480)
    assert code == 0, shown
    for part in ("● ", "redis", "step 3 of 3", "logprob diff", "latest completion, reward", "stopping the services"):
        assert part in shown, part
    for part in ("Traceback", "ERROR", " | ", "env     INFO"):
        assert part not in shown, part
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1, "the cursor is hidden once, and shown again"
    _check_summary(shown.replace("\r\n", "\n"), tmp_path / "runs" / "quickstart")


@pytest.mark.long
def test_terminal_is_restored_by_ctrl_c(vllm: Vllm, tmp_path: Path) -> None:
    command, port = launch_command(tmp_path, vllm, "--training_steps", "500")
    terminal = Terminal(command)
    deadline = time.monotonic() + 300
    # The view may be drawn less often than once a step.
    while not re.search(r"step ([2-9]|\d\d+) of 500", terminal.shown):
        assert terminal.process.poll() is None, terminal.shown
        assert time.monotonic() < deadline, terminal.shown
        time.sleep(0.2)
    started = _descendants(terminal.process.pid)
    terminal.process.send_signal(signal.SIGINT)
    code, shown = terminal.wait(timeout=180)
    assert code == 130, shown
    assert not listens(port)
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
    assert shown.rstrip().splitlines()[-1].endswith(_STOPPED.format(_saved(tmp_path)))
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    assert "Traceback" not in shown


@pytest.mark.long
def test_second_run_on_a_server_that_stays_begins_from_the_first_weights(tmp_path: Path) -> None:
    place = [f"--model_port={free_port()}", f"--state_dir={tmp_path / 'state'}"]

    def gristmill(*arguments: str) -> str:
        command = [sys.executable, "-m", "gristmill_cli", *arguments, *place]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    gristmill("model", "start", "--model", "tiny")
    try:
        run = ["run", "--runs_dir", str(tmp_path / "runs"), "--api_port", str(free_port()), "--training_steps", "1"]
        gristmill(*run, "--run_id", "first")
        assert "1.1" in gristmill("model", "status")
        assert "first weights" in gristmill(*run, "--run_id", "second")
    finally:
        gristmill("model", "stop")
    receipts = read_receipts(tmp_path / "runs" / "second" / RECEIPTS_FILE)
    assert [(one.version, one.state) for one in receipts] == [("1.0", "ok"), ("1.1", "ok")]
    assert not (tmp_path / "runs" / "second" / "logs" / "model.log").exists()


@pytest.mark.long
def test_launcher_quickstart_learns_without_docker(vllm: Vllm, tmp_path: Path) -> None:
    """Checks for `make local` the same facts that the containers' end-to-end test checks for `docker compose up`."""
    server = ModelServer(vllm.url, claim_publishing(vllm.weights_dir), patience=30)
    source = Manifest.read(vllm.models_dir)
    untrained = Policy(ModelSource(source.weights_path, source.tokenizer_path, None, 512), "cpu")
    FilesystemTransport(ModelServers([server]), vllm.weights_dir / "untrained", None).publish(
        untrained.served_tensors(), PolicyVersion(1, 0)
    )
    assert exact_match(vllm.url) <= 0.35

    process, _ = launch(tmp_path, vllm)
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output
    rows = read_jsonl(tmp_path / "runs/quickstart/metrics.jsonl")
    rewards = [row["reward_mean"] for row in rows]
    assert len(rewards) >= 20
    assert fmean(rewards[:5]) <= 0.45, rewards
    assert fmean(rewards[-5:]) >= 0.80, rewards
    assert max(row["rollout_logprob_diff_mean"] for row in rows) <= 0.001
    assert max(row["rollout_logprob_diff_max"] for row in rows) <= 0.01
    assert httpx.get(f"{vllm.url}/weight_info").json()["weight_version"] == rows[-1]["policy_version"]
    assert exact_match(vllm.url) >= 0.80

    # vLLM can start from the finished model.
    with LocalStack() as stack:
        port, finished = free_port(), str(tmp_path / "runs/quickstart/model")
        start_vllm(stack, tmp_path / "weights", port, finished, models_dir=tmp_path / "models")
        assert exact_match(f"http://127.0.0.1:{port}") >= 0.80


@pytest.mark.long
def test_two_stop_signals_end_every_process_of_the_launcher_and_the_step_is_saved(vllm: Vllm, tmp_path: Path) -> None:
    process, port = launch(tmp_path, vllm, "--training_steps", "500")
    started, shown = set[int](), []
    assert process.stdout is not None
    with process:
        for text in process.stdout:
            shown.append(text)
            if text.startswith("step 2/"):
                started = _descendants(process.pid)
                process.send_signal(signal.SIGTERM)
            elif text.startswith("stopping"):
                process.send_signal(signal.SIGHUP)
    assert process.returncode == 128 + signal.SIGTERM, shown
    assert len(started) >= 4
    assert not listens(port)
    alive = [pid for pid in started if Path(f"/proc/{pid}").exists()]
    assert not alive, [Path(f"/proc/{pid}/cmdline").read_text() for pid in alive]
    assert shown[-1].rstrip() == _STOPPED.format(_saved(tmp_path)), shown


_STOPPED = "stopped everything; step {} of run quickstart is saved; the same command continues from there"


def _saved(tmp_path: Path) -> int:
    """Returns the step of the last checkpoint. After a stop signal, that is the last step in the metrics too."""
    folder = tmp_path / "runs" / "quickstart"
    step = max(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))
    assert step == read_jsonl(folder / "metrics.jsonl")[-1]["step"]
    return step


class Launches:
    """Starts one launcher after another on the same folders."""

    def __init__(self, vllm: Vllm, folder: Path) -> None:
        self._vllm, self._folder = vllm, folder

    def __call__(self, *arguments: str) -> tuple[int, str]:
        """Returns the exit code and the output of a launcher."""
        process, _ = launch(self._folder, self._vllm, *arguments)
        output, _ = process.communicate(timeout=240)
        return process.returncode, output

    def steps(self, run: str) -> list[int]:
        """Returns the steps in the metrics of a run's folder."""
        return [row["step"] for row in read_jsonl(self._folder / "runs" / run / "metrics.jsonl")]


@pytest.fixture
def launches(vllm: Vllm, tmp_path: Path) -> Launches:
    return Launches(vllm, tmp_path)


@pytest.mark.long
def test_finished_run_is_refused_extended_and_trained_again(launches: Launches, tmp_path: Path) -> None:
    code, output = launches("--training_steps", "2")
    assert (code, launches.steps("quickstart")) == (0, [1, 2]), output
    model = tmp_path / "runs" / "quickstart" / "model" / "model.safetensors"
    weights = model.read_bytes()
    code, output = launches("--training_steps", "2")
    assert code == 1
    assert "error [run_finished]: " in output
    assert "--fresh" in output
    code, output = launches("--training_steps", "4")
    assert (code, launches.steps("quickstart")) == (0, [1, 2, 3, 4]), output
    assert model.read_bytes() != weights
    code, output = launches("--training_steps", "2", "--fresh")
    assert (code, launches.steps("quickstart")) == (0, [1, 2]), output
    assert launches.steps("quickstart.old-1") == [1, 2, 3, 4]
    assert (tmp_path / "runs" / "quickstart.old-1" / "model").is_dir()
    code, output = launches("--close", "quickstart")
    assert code == 0, output
    shutil.rmtree(model.parent)  # The files no longer show that the run is finished; the store does.
    code, output = launches("--training_steps", "2")
    assert code == 1
    assert "error [run_finished]: " in output
    assert "--fresh" in output
    assert "env     |" not in output


@pytest.mark.long
def test_run_that_failed_before_its_first_step_is_replaced_by_the_corrected_config(
    launches: Launches, tmp_path: Path
) -> None:
    settings = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    for key in ("dataset_path", "eval_dataset_path"):
        settings["dataset"][key] = str(ROOT / "configs" / settings["dataset"][key])
    file = tmp_path / "mine.yaml"

    def attempt(*flags: str, **trainer: object) -> tuple[int, str]:
        file.write_text(yaml.safe_dump(settings | {"trainer": settings["trainer"] | {"training_steps": 2} | trainer}))
        return launches("--config", str(file), *flags)

    code, output = attempt(learnig_rate=1e-4)
    assert code == 1
    assert "error [unknown_key]: " in output
    assert "learning_rate" in output
    assert not (tmp_path / "state" / "redis").exists(), "refused before a service starts"
    # The trainer finds this mistake, when its run is open.
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "trainer_state.json").write_text("{}")
    code, output = attempt("--resume", str(broken))
    assert code == 1
    assert "error [service_ended]: trainer " in output.splitlines()[-1]
    assert "[checkpoint_manifest_missing] " in output.splitlines()[-1]
    assert not (tmp_path / "runs" / "mine" / "metrics.jsonl").exists()
    code, output = attempt()
    assert (code, launches.steps("mine")) == (0, [1, 2]), output


@pytest.mark.long
def test_interrupted_run_gives_way_to_another_config_and_is_resumed(
    launches: Launches, vllm: Vllm, tmp_path: Path
) -> None:
    folder, steps = tmp_path / "runs" / "quickstart", 12
    process, _ = launch(tmp_path, vllm, "--training_steps", str(steps))
    deadline = time.monotonic() + 120
    while not (folder / "metrics.jsonl").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 130, output
    assert len(launches.steps("quickstart")) < steps
    code, output = launches("--run_id", "other", "--training_steps", "1")
    assert (code, launches.steps("other")) == (0, [1]), output
    steps += 2  # more than the interrupted start asked for
    code, output = launches("--training_steps", str(steps))
    assert (code, launches.steps("quickstart")) == (0, list(range(1, steps + 1))), output
    assert len(list(read_rollouts(folder))) == steps * 16, "no group is lost or trained twice"


@pytest.mark.parametrize(
    "output", ["terminal", *(pytest.param(one, marks=pytest.mark.long) for one in ("standard error", "one pipe"))]
)
def test_failed_service_is_the_last_line_with_its_error_and_its_log(tmp_path: Path, output: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")  # The launcher does not check the weights; the model service does.
    command = [sys.executable, str(SCRIPT), "--model", str(model), "--runs_dir", str(tmp_path / "runs")]
    command += [f"--api_port={free_port()}", f"--model_port={free_port()}", f"--state_dir={tmp_path / 'state'}"]
    if output == "terminal":
        code, shown = Terminal(command, columns=500).wait(timeout=240)
        assert "\x1b[?25h" in shown, "the cursor is shown again"
        last = shown.splitlines()[-1]
    else:
        target = subprocess.PIPE if output == "standard error" else subprocess.STDOUT
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=target, text=True, timeout=120, check=False)
        code, last = done.returncode, (done.stderr or done.stdout).splitlines()[-1]
    assert code == 1
    assert last.startswith("error [service_ended]: model ")
    assert "[model_weights_missing] " in last
    assert str(model) in last
    log = tmp_path / "runs" / "quickstart" / "logs" / "model.log"
    assert str(log) in last
    assert "[model_weights_missing] " in log.read_text()
