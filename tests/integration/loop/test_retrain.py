"""`gristmill retrain`: a recorded run is trained again from its files alone."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tests.support.ports import free_port
from tests.support.recorded_run import EVERY, RUN, STEPS, record
from tests.support.stack import ROOT, Output, Vllm, start_api, start_redis, start_vllm

from gristmill import SyncClient, TrajectoryGroup
from gristmill.archive import ArchivedGroup, read_archive, segment, segments
from gristmill.archive.run_file import read_run_file
from gristmill.internal.archive_writer import RunWriter
from gristmill.internal.lines import read_jsonl
from gristmill_cli.local.processes import LocalStack
from gristmill_cli.main import main
from gristmill_trainer.checkpoint.digests import DIGESTS_FILE, lineage, read_digests
from gristmill_view.pack import open_run
from gristmill_view.run_source import RunSource

pytestmark = pytest.mark.long
"""Recording a run takes minutes: `make test` has unit/trainer/replay/test_again.py and test_resume_on_leases.py."""


@pytest.fixture(scope="module")
def recorded(vllm: Vllm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(vllm, tmp_path_factory.mktemp("recorded"))


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    """A copy of the recorded run, alone in its folder of runs."""
    return Path(shutil.copytree(recorded, tmp_path / "runs" / recorded.name))


@pytest.fixture(scope="module", autouse=True)
def _threads() -> Iterator[None]:
    """The commands run in this process, and set the number of threads of the run."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


NO_API = "http://127.0.0.1:1"


def trusted(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """The run is of this machine, so the path of its model in the record is good."""
    return (*arguments, "--trust") if {"retrain", "bisect", "fork"} & {*arguments} else arguments


def gristmill(run: Path, *arguments: str, api: str = NO_API) -> subprocess.CompletedProcess[str]:
    """Runs a command of `gristmill` in this process, because a new process imports torch for five seconds. No service
    answers at its addresses.

    `run`: a run's folder or pack in the folder of runs.
    """
    arguments = trusted(arguments)
    output, errors = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(output), redirect_stderr(errors):
        patched.setenv("GRISTMILL_MODELS_DIR", str(run.parent / "no-manifest"))
        code = main(["--runs", str(run.parent), "--api", api, *arguments])
    done = subprocess.CompletedProcess(arguments, code, output.getvalue(), errors.getvalue())
    print(done.stdout, done.stderr)  # noqa: T201  pytest shows it where a test fails
    return done


def gristmill_process(run: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs a command of `gristmill` as a user does, in another process."""
    places = {"GRISTMILL_MODELS_DIR": str(run.parent / "no-manifest")}
    command = [sys.executable, "-m", "gristmill_cli", "--runs", str(run.parent), *trusted(arguments)]
    done = subprocess.run(command, env=os.environ | places | environ, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)  # noqa: T201  pytest shows it where a test fails
    return done


@pytest.fixture
def packed(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recorded run as one file on another machine, which has the model and no run."""
    return pack(run, tmp_path / "elsewhere", monkeypatch)


def pack(run: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Packs a run into `folder`, and removes the folder of the run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.with_name(f"{folder.name}-cache")))
    file = folder / f"{run.name}.gristmill.zip"
    assert gristmill(run, "pack", run.name, "--out", str(file)).returncode == 0
    shutil.rmtree(run)
    return file


def code_of(done: subprocess.CompletedProcess[str]) -> str:
    return done.stderr.rpartition("error [")[2].partition("]")[0]


def keep_groups(run: Path, kept: set[str]) -> None:
    """Removes all other groups from the archive, as API_ARCHIVE_MAX_BYTES does."""
    rewrite(run, [group for group in read_archive(run) if group.group_id in kept])


def rewrite(run: Path, groups: list[ArchivedGroup]) -> None:
    """Replaces the archive's groups."""
    segments_of_run = segments(run)
    with segments_of_run[0].open("rb") as file:
        opening = segment.read_opening(file, "")
    for path in segments_of_run:
        path.unlink()
    assert opening is not None
    with contextlib.closing(RunWriter(run / "rollouts", opening.run_id, opening.created_ms, 1 << 30)) as writer:
        for group in groups:
            writer.append(group.group_id, group.schema, group.body)
        writer.sync()


def manifest(folder: Path) -> dict[str, Any]:
    files: dict[str, Any] = json.loads((folder / "manifest.json").read_text())["files"]
    return files


def test_verify_finds_every_checkpoint_of_a_killed_run_equal(run: Path) -> None:
    records = read_digests(run / DIGESTS_FILE)
    assert [one.step for one in lineage(records)] == list(range(EVERY, STEPS + 1, EVERY))
    assert {one.progress.version.incarnation for one in records} == {1, 2, 3}, "each kill gave another trainer"
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    done = gristmill_process(run, "retrain", RUN, "--verify")
    assert done.returncode == 0
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*")}, "a verification writes nothing"
    assert [path.name for path in run.parent.iterdir()] == [RUN]


def test_retrained_run_has_the_checkpoint_files_of_the_original(run: Path) -> None:
    assert gristmill_process(run, "retrain", RUN).returncode == 0
    retrained = run.parent / f"{RUN}-retrained"
    for step in (STEPS - EVERY, STEPS):
        name = f"checkpoints/step-{step:06d}"
        assert manifest(retrained / name) == manifest(run / name)
        for file in manifest(run / name):
            assert (retrained / name / file).read_bytes() == (run / name / file).read_bytes()
    rows, again = read_jsonl(run / "metrics.jsonl"), read_jsonl(retrained / "metrics.jsonl")
    assert [(row["step"], row["loss"], row["grad_norm"], row["reward_mean"]) for row in again] == [
        (row["step"], row["loss"], row["grad_norm"], row["reward_mean"]) for row in rows
    ]
    assert min(row["effective_sample_size"] for row in again) > 0.99, "the run was on policy"


def test_verify_names_the_first_checkpoint_that_differs_and_the_software(run: Path) -> None:
    file = run / DIGESTS_FILE
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        row["trainer"]["software"]["torch"] = "2.0.0"
        if row["progress"]["step"] >= 4:
            row["files"]["model.safetensors"] = "0" * 64
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    done = gristmill(run, "retrain", RUN, "--verify")
    assert done.returncode == 1
    assert "the checkpoint of step 4 differs in model.safetensors\n" in done.stdout
    assert "torch: 2.0.0 in the original" in done.stdout


def test_verify_from_a_checkpoint_on_disk_trains_the_steps_after_it(run: Path) -> None:
    done = gristmill(run, "retrain", RUN, "--verify", "--at", "5")
    assert done.returncode == 0
    assert f"trains steps 5 to {STEPS}\n" in done.stdout


def test_step_without_its_groups_is_refused_with_the_checkpoint_after_it(run: Path) -> None:
    batches = {step: ids for one in lineage(read_digests(run / DIGESTS_FILE)) for step, ids in one.batches.items()}
    keep_groups(run, {group_id for step, ids in batches.items() if step > 3 for group_id in ids})
    done = gristmill(run, "retrain", RUN, "--verify")
    assert (done.returncode, code_of(done)) == (1, "groups_missing")
    assert f"the groups of {STEPS - 3} of {STEPS} steps; steps 1-3 lack 12 groups" in done.stderr
    assert gristmill(run, "retrain", RUN, "--verify", "--at", "4").returncode == 0


def test_run_without_digests_is_refused(run: Path) -> None:
    (run / DIGESTS_FILE).unlink()
    done = gristmill(run, "retrain", RUN, "--verify")
    assert (done.returncode, code_of(done)) == (1, "run_not_recorded")


def lose_the_model(run: Path) -> str:
    """Changes the run's record to a model that does not exist. Returns the name of the model that was recorded."""
    file = run / DIGESTS_FILE
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    model: str = rows[0]["trainer"]["model"]
    for row in rows:
        row["trainer"]["model"] = str(run / "gone")
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return model


def test_missing_model_is_named(run: Path) -> None:
    lose_the_model(run)
    done = gristmill(run, "retrain", RUN, "--verify")
    assert (done.returncode, code_of(done)) == (1, "model_missing")


def test_other_model_takes_the_place_of_a_missing_one(run: Path) -> None:
    model = lose_the_model(run)
    assert gristmill(run, "retrain", RUN, "--verify", "--until", "2", "--model", model).returncode == 0


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return read_jsonl(folder / "metrics.jsonl")


def test_other_settings_act_after_the_step_and_make_the_data_off_policy(run: Path) -> None:
    done = gristmill(run, "retrain", RUN, "--objective", "cispo", "--learning_rate", "5e-4", "--at", "3", "--out", "b")
    assert done.returncode == 0
    rows, original = rows_of(run.parent / "b"), rows_of(run)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), "no checkpoint up to step 3 is on disk"
    assert [row["learning_rate"] for row in rows] == [1e-4] * 3 + [5e-4] * 3
    assert [row["grad_norm"] for row in rows[:3]] == [row["grad_norm"] for row in original[:3]]
    sizes = [row["effective_sample_size"] for row in rows]
    # Steps 5 and 6 have other completions, so either may be further from its policy.
    assert max(sizes[4:]) < min(sizes[:4]), "the policy before step 4 is the recorded policy"
    assert min(sizes[4:]) < 0.95 < min(sizes[:4])
    settings = json.loads((run.parent / "b" / "retrain.json").read_text())
    assert settings == {
        "run": RUN, "at": 3, "until": None, "settings": {"objective": "cispo", "learning_rate": 5e-4}
    }  # fmt: skip
    record = read_run_file(run.parent / "b" / "run.json")
    assert (record.run_id, record.trainer or {}) == (
        "b", {**(read_run_file(run / "run.json").trainer or {}), "objective": "cispo", "learning_rate": 5e-4}
    )  # fmt: skip


def test_retraining_stops_at_a_small_effective_sample_size_unless_forced(run: Path) -> None:
    high = ["retrain", RUN, "--learning_rate", "0.01"]
    done = gristmill(run, *high)
    assert (done.returncode, code_of(done)) == (1, "sample_size_too_small")
    sizes = [row["effective_sample_size"] for row in rows_of(run.parent / f"{RUN}-retrained")]
    assert sizes[-1] < 0.1 < min(sizes[:-1])
    assert gristmill(run, *high, "--force").returncode == 0
    assert len(rows_of(run.parent / f"{RUN}-retrained")) == STEPS, "the second retraining replaces the first"


def test_setting_with_the_recorded_value_changes_nothing(run: Path) -> None:
    done = gristmill(run, "retrain", RUN, "--objective", "dapo", "--until", "2")
    assert done.returncode == 0
    assert "all 1 checkpoints are equal, bit for bit\n" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--verify", "--learning_rate", "1"], "verify_with_settings"),
        (["--out", "../elsewhere"], "run_id_invalid"),
        (["--out", RUN], "folder_taken"),
        (["--until", "7"], "step_outside_run"),
        (["--at", "6"], "step_outside_run"),
        (["--verify", "--until", "1"], "nothing_compared"),
        (["--objectiv", "cispo"], "unknown_flag"),
        (["--learning_rate", "fast"], "invalid_settings"),
    ],
)
def test_wrong_arguments_are_refused(run: Path, arguments: list[str], code: str) -> None:
    done = gristmill(run, "retrain", RUN, *arguments)
    assert (done.returncode, code_of(done)) == (1, code)
    assert [path.name for path in run.parent.iterdir()] == [RUN]


@pytest.mark.parametrize("metric", ["grad_norm", "kl_rollout"])
def test_bisect_finds_the_sequence_that_causes_a_spike(run: Path, metric: str) -> None:
    """The log-probabilities and the advantages of one sequence are spoilt in the archive."""
    ids = next(one.batches[5] for one in lineage(read_digests(run / DIGESTS_FILE)) if 5 in one.batches)
    groups = list(read_archive(run))
    place = next(number for number, group in enumerate(groups) if group.group_id == sorted(ids)[2])
    group = TrajectoryGroup.decode(groups[place].body)
    start, end = int(group.lengths[:6].sum()), int(group.lengths[:7].sum())
    advantages, logprobs = np.zeros(len(group.tokens), np.float32), group.logprobs.copy()
    advantages[start:end] = 300.0
    logprobs[start:end] -= 3.0
    spoilt = dataclasses.replace(group, advantages=advantages, logprobs=np.where(group.mask, logprobs, 0))
    groups[place] = dataclasses.replace(groups[place], body=spoilt.encode())
    rewrite(run, groups)
    done = gristmill(run, "bisect", RUN, "--metric", metric, "--step", "5")
    assert done.returncode == 0
    assert f"without group {group.group_id}: " in done.stdout
    assert "without sequence 6 of this group: " in done.stdout
    assert f"/view/{RUN}/group/{group.group_id}#s6\n" in done.stdout
    value, usual, *rest = map(float, re.findall(r"(?: is|:) (\d[\d.e+-]*)(?:;|\n)", done.stdout)[-4:])
    assert all(abs(left - usual) < 0.2 * abs(value - usual) for left in rest), done.stdout


def test_bisect_in_a_terminal_opens_the_sequence_on_the_page(run: Path, tmp_path: Path) -> None:
    opened, browser = tmp_path / "opened", tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {shlex.quote(str(opened))}\n')
    browser.chmod(0o755)
    terminal, end = pty.openpty()
    command = [sys.executable, "-m", "gristmill_cli", "--runs", str(run.parent), "bisect", RUN, "--metric", "grad_norm"]
    environ = {**os.environ, "BROWSER": str(browser), "GRISTMILL_MODELS_DIR": str(tmp_path)}
    bisect = subprocess.Popen([*command, "--step", "5", "--trust"], env=environ, stdout=end)
    try:
        while not (opened.is_file() and opened.read_text().endswith("\n")):
            assert bisect.poll() is None
            time.sleep(0.1)
        url = opened.read_text().strip()
        group = url.rpartition("/group/")[2].partition("#s")[0]
        for path in (url, f"{url.partition('/view/')[0]}/view/api/runs/{RUN}/groups/{group}"):
            assert httpx.get(path, timeout=120).status_code == 200
        bisect.send_signal(signal.SIGINT)
        assert bisect.wait(120) == 0
    finally:
        bisect.kill()
    assert f"the page: {url} " in os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    os.close(end)


def test_bisect_of_a_metric_that_no_sequence_causes_is_refused(run: Path) -> None:
    done = gristmill(run, "bisect", RUN, "--metric", "tokens_per_second", "--step", "5")
    assert (done.returncode, code_of(done)) == (1, "metric_unknown")


def test_fork_continues_live_from_a_step_as_a_new_run(
    vllm: Vllm, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint of step 3 never existed, so it is trained again."""
    runs = run.parent
    with LocalStack(Output().add) as stack:
        redis_port, api_port = free_port(), free_port()
        start_redis(stack, tmp_path / "redis", redis_port)
        start_api(stack, redis_port, api_port, GRISTMILL_RUNS_DIR=str(runs))
        places = vllm.environ(f"http://127.0.0.1:{api_port}", runs)
        changes = ["--set", "learning_rate=2e-4", "--set", "objective=cispo", "--set", "dataset.temperature=0.9"]
        command = [sys.executable, "-m", "gristmill_cli", "fork", RUN, "--trust", "--at", "3", "--id", "forked"]
        command += changes
        with SyncClient(places["GRISTMILL_API_URL"]) as api:
            api.create_run("other", {}, 8)
            refused = gristmill(run, "fork", RUN, "--at", "3", "--id", "refused", api=places["GRISTMILL_API_URL"])
            assert (refused.returncode, code_of(refused)) == (1, "run_open"), "the fork would train the open run"
            assert not (runs / "refused").exists()
            api.close_run("other")
        done = subprocess.run(command, env={**os.environ, **places}, capture_output=True, text=True, check=False)
        print(done.stdout, done.stderr)  # noqa: T201  pytest shows it where a test fails
        assert done.returncode == 0
        with SyncClient(places["GRISTMILL_API_URL"]) as api:
            record = api.get_run("forked")
    assert (record.state, record.training_steps) == ("finished", STEPS - 3)
    trainer = record.trainer or {}
    assert (trainer["learning_rate"], trainer["objective"], trainer["batch_size"]) == (2e-4, "cispo", 16)
    assert record.env["dataset"]["temperature"] == 0.9
    first = read_digests(runs / "forked" / DIGESTS_FILE)[0]
    assert (first.after, first.progress.origin) == (None, str(runs / "forked" / "origin" / "step-000003"))
    with contextlib.closing(RunSource([runs])) as source:
        compared = asyncio.run(source.compare([RUN, "forked"]))
    assert compared["after"] == {RUN: 0, "forked": 3}
    assert {"trainer.learning_rate", "trainer.objective"} <= {row["key"] for row in compared["settings_diff"]}
    again = gristmill(run, "retrain", "forked", "--verify")
    assert again.returncode == 0, "a fork can be trained again from its own archive and its first checkpoint"
    file = pack(runs / "forked", tmp_path / "elsewhere", monkeypatch)
    again = gristmill(file, "retrain", str(file), "--verify")
    assert again.returncode == 0, "the pack has the checkpoint from which the fork began"


def test_packed_run_is_verified_on_another_machine(packed: Path) -> None:
    done = gristmill(packed, "retrain", str(packed), "--verify")
    assert done.returncode == 0
    assert f"all {STEPS // EVERY} checkpoints are equal, bit for bit\n" in done.stdout
    assert [path.name for path in packed.parent.iterdir()] == [packed.name]


def test_packed_run_is_retrained_into_the_folder_of_runs(packed: Path) -> None:
    assert gristmill(packed, "retrain", str(packed), "--until", "2").returncode == 0
    retrained = packed.parent / f"{RUN}-retrained"
    assert [row["step"] for row in rows_of(retrained)] == [1, 2]
    with contextlib.closing(RunSource([*open_run(packed).roots, packed.parent])) as source:
        assert asyncio.run(source.compare([RUN, retrained.name]))["after"] == {RUN: 0, retrained.name: 0}


def test_bisect_searches_a_packed_run(packed: Path) -> None:
    done = gristmill(packed, "bisect", str(packed), "--metric", "grad_norm", "--step", "3")
    assert done.returncode == 0
    assert f"(gristmill view {packed}): http://127.0.0.1:8080/view/{RUN}/group/" in done.stdout


def test_fork_of_a_packed_run_is_prepared_in_the_folder_of_runs(packed: Path) -> None:
    """A pack has no checkpoint, so the steps up to the fork are trained again."""
    done = gristmill(packed, "fork", str(packed), "--at", "2")
    assert done.returncode == 0
    folder = packed.parent / f"{RUN}-fork-2"
    assert (folder / "fork.yaml").is_file()
    assert "model.safetensors" in manifest(folder / "origin/step-000002")


def test_fork_without_an_api_is_prepared_and_names_the_command(run: Path) -> None:
    strange = run / f"checkpoints/step-00000{STEPS}" / "evil.py"
    strange.write_text("raise SystemExit('code of a record ran')\n")
    done = gristmill(run, "fork", RUN, "--at", str(STEPS))
    strange.unlink()
    assert done.returncode == 0
    folder = run.parent / f"{RUN}-fork-{STEPS}"
    assert f"gristmill run {folder}/fork.yaml --resume {folder}/origin/step-00000{STEPS}" in done.stdout
    copied = {path.name for path in (folder / f"origin/step-00000{STEPS}").iterdir()}
    assert copied == {path.name for path in (run / f"checkpoints/step-00000{STEPS}").iterdir()}
    assert manifest(folder / f"origin/step-00000{STEPS}") == manifest(run / f"checkpoints/step-00000{STEPS}")
    again = gristmill(run, "fork", RUN, "--at", str(STEPS))
    assert (again.returncode, code_of(again)) == (1, "folder_taken")


def test_fork_refuses_an_unknown_setting_of_the_trainer(run: Path) -> None:
    done = gristmill(run, "fork", RUN, "--at", "2", "--set", "objective=ppo")
    assert (done.returncode, code_of(done)) == (1, "invalid_settings")
    assert gristmill(run, "fork", RUN, "--at", "2", "--set", "objective").returncode == 1
    assert [path.name for path in run.parent.iterdir()] == [RUN]


COMMANDS = re.findall(r"^gristmill (.+)$", (ROOT / "docs" / "reproduce.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_documentation_work_as_printed(run: Path, command: str) -> None:
    assert len(COMMANDS) == 5
    done = gristmill(run, *shlex.split(command))
    assert done.returncode == 0
    assert "the archive has the groups of all 6 steps" in done.stdout


@pytest.mark.timeout(3600)
def test_real_model_of_135_million_parameters_is_retrained_bit_for_bit(tmp_path: Path) -> None:
    output, models, weights = Output(), tmp_path / "models", tmp_path / "weights"
    with LocalStack(output.add) as stack:
        port = free_port()
        start_vllm(stack, weights, port, "smollm2", models)
        recorded = record(Vllm(f"http://127.0.0.1:{port}", weights, models, output), tmp_path, learning_rate=1e-5)
    done = gristmill(recorded, "retrain", RUN, "--verify")
    assert done.returncode == 0
    assert f"all {STEPS // EVERY} checkpoints are equal, bit for bit\n" in done.stdout
