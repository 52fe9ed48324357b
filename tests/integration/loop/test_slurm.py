"""`gristmill slurm` on a real Slurm: the quickstart trains across nodes, and survives what clusters do."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean

import httpx
import pytest
from tests.support.ports import free_port
from tests.support.slurm_cluster import SlurmCluster, slurm_cluster
from tests.support.stack import MODELS_DIR, ROOT

from gristmill import PolicyVersion, RunState, SyncClient
from gristmill.archive import read_archive
from gristmill.archive.run_file import read_run_file
from gristmill.internal.lines import read_jsonl
from gristmill.internal.metrics import METRICS_FILE
from gristmill.internal.receipts import RECEIPTS_FILE, ReceiptState, read_receipts

GROUPS_PER_STEP = 16
_MINUTES = 60
"""Time limit of the jobs, until a test lowers it."""


class Training:
    """The quickstart as a job with two nodes of the trainer and one node with two model servers."""

    def __init__(self, cluster: SlurmCluster, folder: Path, steps: int) -> None:
        self.cluster = cluster
        self.steps = steps
        self.run = folder / "runs" / "quickstart"
        self.state = folder / ".gristmill" / "slurm" / "quickstart"
        self.api_port = free_port()
        config = folder / "quickstart.yaml"
        text = (ROOT / "configs" / "quickstart.yaml").read_text()
        text = text.replace("training_steps: 60", f"training_steps: {steps}")
        config.write_text(text.replace(": datasets/", f": {ROOT}/configs/datasets/"))
        places = {
            "GRISTMILL_CONFIG_DIR": str(ROOT / "configs"),
            "GRISTMILL_MODELS_DIR": str(MODELS_DIR),
            "GRISTMILL_RUNS_DIR": str(folder / "runs"),
            "GRISTMILL_RUN_ID": "",
        }
        numbers = {"--model-nodes": 1, "--servers-per-node": 2, "--trainer-nodes": 2, "--env-workers": 3}
        options = [str(word) for option in numbers.items() for word in option]
        gristmill = [sys.executable, "-m", "gristmill_cli", "slurm", str(config), "--model", "tiny", *options]
        self._submission = [*gristmill, "--api-port", str(self.api_port), "--time", str(_MINUTES)]
        self._places, self._folder = places, folder
        self.job = self.submit().removeprefix("job ").partition(";")[0]

    def submit(self) -> str:
        """Returns the output of `gristmill slurm`. Raises AssertionError with its error."""
        return self.cluster.run(*self._submission, environ=self._places, cwd=self._folder)

    @property
    def output(self) -> str:
        """The output of all starts of the job."""
        return (self.state / f"job-{self.job}.out").read_text()

    def log(self, name: str) -> str:
        """The log of one step, from all of its starts."""
        return (self.run / "logs" / f"{name}.log").read_text()

    def step(self) -> int:
        """The last step with metrics."""
        file = self.run / METRICS_FILE
        return max((int(row["step"]) for row in read_jsonl(file)), default=0) if file.exists() else 0

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Waits, and fails at once if the job ends."""

        def met() -> bool:
            found = condition()
            assert found or self.cluster.states(self.job), f"the job ended before: {what}\n{self.output}"
            return found

        self.cluster.wait(met, what, timeout=1200)

    def wait_for_steps(self, number: int = 2) -> None:
        """Waits until the trainer has trained this many more steps."""
        target = self.step() + number
        self.wait(lambda: self.step() >= target, f"step {target} is trained")

    def wait_for_end(self) -> None:
        self.cluster.wait(lambda: not self.cluster.states(self.job), "the job is over", timeout=2400)

    def nodes(self) -> set[str]:
        """The nodes that the job has now."""
        listed = self.cluster.run("squeue", "--noheader", "--jobs", self.job, "--format=%N").split()
        return {node for part in listed for node in self.cluster.run("scontrol", "show", "hostnames", part).split()}

    def assert_finished(self) -> None:
        """Every step was trained once, every group in one step, and versions never went backwards."""
        rows = read_jsonl(self.run / METRICS_FILE)
        assert [row["step"] for row in rows] == list(range(1, self.steps + 1)), self.output
        versions = [PolicyVersion.parse(row["policy_version"]) for row in rows]
        assert versions == sorted(versions)
        record = read_run_file(self.run / "run.json")
        assert (record.state, record.version) == (RunState.FINISHED, str(versions[-1]))
        groups = [group.group_id for group in read_archive(self.run / "rollouts")]
        assert len(groups) == len(set(groups)) == self.steps * GROUPS_PER_STEP
        receipts = read_receipts(self.run / RECEIPTS_FILE)
        assert not [receipt for receipt in receipts if receipt.state is ReceiptState.FAILED]
        servers = {receipt.server.rpartition(":")[2] for receipt in receipts if receipt.state is ReceiptState.OK}
        assert servers == {"9000", "9001"}
        assert (self.run / "model" / "model.safetensors").exists()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SlurmCluster]:
    """Four nodes: one more than the job has, to replace one."""
    with slurm_cluster(tmp_path / "cluster", nodes=4) as found:
        yield found


@pytest.mark.long
def test_quickstart_trains_to_its_reward_across_three_nodes(cluster: SlurmCluster, tmp_path: Path) -> None:
    training = Training(cluster, tmp_path, steps=60)
    training.wait(lambda: training.step() >= 1, "the first step is trained")
    with pytest.raises(AssertionError, match=rf"error \[run_submitted\]: job {training.job} "):
        training.submit()
    steps = cluster.steps()
    first, second, third = "127.0.0.1", "127.0.0.2", "127.0.0.3"
    assert {name: nodes for name, (_, nodes) in steps.items()} == {
        "batch": [first], "redis": [first], "api": [first], "trainer": [first, second],
        "model-0": [third], "model-1": [third], "env-0": [third], "env-1": [second], "env-2": [first],
    }  # fmt: skip
    api = f"http://{first}:{training.api_port}"
    assert httpx.get(f"{api}/v1/runs").status_code == 401
    with SyncClient(api, token=(training.state / "tokens" / "admin").read_text()) as client:
        assert client.get_run("quickstart").state == RunState.OPEN
        assert len(client.environments("quickstart")) == 3
    training.wait_for_end()
    training.assert_finished()
    assert "is finished" in training.output
    assert "rank 1 of 2" in training.log("trainer")
    for number in range(3):
        assert "--slurm: 2 servers on 127.0.0.3" in training.log(f"env-{number}")
    rewards = [row["reward_mean"] for row in read_jsonl(training.run / METRICS_FILE)]
    assert fmean(rewards[:5]) <= 0.45, rewards
    assert fmean(rewards[-5:]) >= 0.80, rewards


@pytest.mark.long
def test_job_survives_cancelled_steps_lost_and_drained_nodes_and_its_time_limit(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    training = Training(cluster, tmp_path, steps=250)
    training.wait_for_steps()

    for name in ("trainer", "model-1", "env-0", "api", "redis"):
        cancelled = cluster.steps()[name][0]
        cluster.cancel_step(cancelled)
        training.wait(lambda: _id(cluster, name) not in (None, cancelled), f"{name} starts again")  # noqa: B023
        training.wait_for_steps()
    newest = read_jsonl(training.run / METRICS_FILE)[-1]["policy_version"]
    assert PolicyVersion.parse(newest).incarnation == 2, "only the cancelled step of the trainer started a trainer"

    drained = "127.0.0.3"
    assert drained in training.nodes()
    cluster.update("nodename", drained, state="drain", reason="test")
    training.wait_for_steps()
    assert drained in training.nodes(), "the job continues on the drained node"

    before = training.step()
    cluster.update("jobid", training.job, timelimit=str(_elapsed_minutes(cluster, training.job) + 3))
    training.wait(lambda: cluster.states(training.job) == {"PENDING"}, "the job returns to the queue")
    assert "[stopped]" in training.log("trainer")
    assert _newest_checkpoint(training.run) == training.step() >= before, "the stop wrote a checkpoint of its step"
    cluster.update("jobid", training.job, timelimit=str(_MINUTES))
    cluster.start_now(training.job)
    training.wait_for_steps()
    assert training.nodes() == set(cluster.nodes) - {drained}

    cluster.update("nodename", drained, state="resume")
    lost = cluster.steps()["trainer"][1][1]
    cluster.lose(lost)
    cluster.start_now(training.job)
    training.wait_for_steps()
    assert training.nodes() == set(cluster.nodes) - {lost}
    assert re.findall(r"job \d+, start (\d)", training.output) == ["1", "2", "3"]

    training.wait_for_end()
    training.assert_finished()


@pytest.mark.long
def test_cancelled_job_writes_a_checkpoint_and_does_not_return(cluster: SlurmCluster, tmp_path: Path) -> None:
    training = Training(cluster, tmp_path, steps=1000)
    training.wait_for_steps()
    cluster.run("scancel", training.job)
    training.wait_for_end()
    assert "the job was cancelled" in training.output
    assert _newest_checkpoint(training.run) == training.step()


def _id(cluster: SlurmCluster, name: str) -> str | None:
    """Returns the id of the running step with this name."""
    found = cluster.steps().get(name)
    return None if found is None else found[0]


def _elapsed_minutes(cluster: SlurmCluster, job: str) -> int:
    """Returns the minutes since the job's start, rounded up."""
    shown = cluster.run("squeue", "--noheader", "--jobs", job, "--format=%M").split()[0]
    parts = [int(part) for part in shown.split(":")]
    seconds: int = sum(part * 60**place for place, part in enumerate(reversed(parts)))
    return math.ceil(seconds / 60)


def _newest_checkpoint(run: Path) -> int:
    return max(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))
