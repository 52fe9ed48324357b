"""The batch script of `gristmill slurm`. tests/integration/loop/test_slurm.py runs it on a real cluster."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.errors import raises
from tests.support.stack import ROOT

from gristmill import ConfigError, GristmillError
from gristmill_cli.local.redis_server import SETTINGS
from gristmill_cli.main import main
from gristmill_cli.slurm import Job, Nodes, containers, submit
from gristmill_env.settings.servers import ServerConfig
from gristmill_env.slurm import discover
from gristmill_model.errors import ModelError

QUICKSTART = ["slurm", "quickstart", "--model-nodes", "1", "--trainer-nodes", "2", "--env-workers", "3", "--dry-run"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the programs of `make setup`, in which commands are called. PATH has no program of Slurm."""
    for name in ("RUN_ID", "RUNS_DIR", "MODELS_DIR"):
        monkeypatch.delenv(f"GRISTMILL_{name}", raising=False)
    for program in (".venv-model/bin/python", "bin/redis-server"):
        _program(tmp_path / program, "")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("GRISTMILL_CONFIG_DIR", str(ROOT / "configs"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _program(path: Path, output: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {shlex.quote(output)}\n")
    path.chmod(0o755)
    return path


def job(home: Path, **changes: Any) -> Job:
    found = Job.read("quickstart", Nodes(model=1, trainer=2), "tiny", {"GRISTMILL_CONFIG_DIR": str(ROOT / "configs")})
    return replace(found, **changes)


def values(script: str) -> dict[str, str]:
    """Returns the variables of the script's header."""
    header = script.partition("set -euo pipefail")[0]
    words = shlex.split(header, comments=True)
    return dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))


def directives(script: str) -> list[list[str]]:
    """Returns sbatch's options of each component of the job."""
    lines = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    at = lines.index("hetjob")
    return [lines[:at], lines[at + 1 :]]


def test_dry_run_prints_the_script_and_writes_nothing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(home.rglob("*"))
    assert main([*QUICKSTART, "--time", "4:00:00", "--partition", "gpu", "--gpus-per-node", "8"]) == 0
    script = capsys.readouterr().out
    trainer, model = directives(script)
    assert {"--nodes=2", "--time=4:00:00", "--partition=gpu", "--gpus-per-node=8", "--requeue"} <= set(trainer)
    assert {"--nodes=1", "--time=4:00:00", "--partition=gpu", "--gpus-per-node=8", "--requeue"} <= set(model)
    found = values(script)
    assert found["CONFIG"] == str(ROOT / "configs" / "quickstart.yaml")
    assert (found["RUN"], found["MODEL"], found["DEVICE"]) == ("quickstart", "tiny", "cuda")
    assert (found["RANKS_PER_NODE"], found["GPUS_PER_SERVER"], found["ENV_WORKERS"]) == ("8", "8", "3")
    assert sorted(home.rglob("*")) == before


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"nodes": Nodes(model=4, trainer=8, gpus=8, servers=4, env_workers=16), "time": "1-00:00:00"},
        {"containers": "pyxis", "image": "/shared/gristmill-{service}.sqsh"},
        {"containers": "apptainer", "image": "docker://lab/gristmill-{service}:1"},
        {"run_id": "it's a run", "state": Path("/shared/a folder/'x'"), "partition": "a b"},
    ],
)
@pytest.mark.slow
def test_shellcheck_accepts_the_script(home: Path, changes: dict[str, Any]) -> None:
    script = job(home, **changes).script()
    shellcheck = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([shellcheck, "-"], input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(("written", "seconds"), [(None, 30), (-60.0, 30), (60.0, 0)])
def test_job_waits_for_the_report_of_this_start(home: Path, written: float | None, seconds: int) -> None:
    (loop,) = re.findall(r"^for [^\n]* writes the report.*?^done$", job(home).script(), re.MULTILINE | re.DOTALL)
    mark, report = home / "running", home / "quickstart" / "report.html"
    mark.touch()
    if written is not None:
        report.parent.mkdir()
        report.write_text("<html>")
        os.utime(report, (mark.stat().st_mtime + written,) * 2)
    variables = {"LOCAL": str(home), "GRISTMILL_RUNS_DIR": str(home), "RUN": "quickstart"}
    command = ["/bin/bash", "-euc", "sleep() { echo; }\n" + loop]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.count("\n") == seconds


def test_values_of_the_header_are_quoted(home: Path) -> None:
    state = Path("/shared/a folder/$(x) 'y'")
    assert values(job(home, state=state).script())["STATE"] == str(state)


def test_redis_has_the_settings_of_the_other_stacks(home: Path) -> None:
    script = job(home).script()
    wanted = [line for line in SETTINGS.read_text().splitlines() if line and not line.startswith("#")]
    assert "appendfsync always" in wanted
    assert values(script)["REDIS_CONF"].splitlines() == wanted
    assert '"$REDIS" "$LOCAL/redis.conf" --port 0 ' in script


def test_one_rank_and_one_server_per_node_train_on_cpus(home: Path) -> None:
    found = values(job(home).script())
    assert (found["DEVICE"], found["RANKS_PER_NODE"], found["SERVERS_PER_NODE"], found["GPUS_PER_SERVER"]) == (
        "cpu", "1", "1", "0"
    )  # fmt: skip


@pytest.mark.parametrize("servers", [1, 2, 4, 8])
def test_environment_with_slurm_finds_the_servers_of_the_job(home: Path, servers: int) -> None:
    """The three variables that job.sh sets, and the addresses at which it starts servers."""
    found = values(job(home, nodes=Nodes(model=2, trainer=1, servers=servers)).script())
    per_node, first = int(found["SERVERS_PER_NODE"]), int(found["FIRST_MODEL_PORT"])
    variables = {"SLURM_JOB_NODELIST": "a,b,c", "NUM_TRAINING_NODES": "1", "INFER_TP": str(8 // per_node)}
    addresses = [server.base_url for server in discover([ServerConfig()], variables)]
    assert addresses == [f"http://{node}:{first + i}" for node in ("b", "c") for i in range(per_node)]


@pytest.mark.parametrize(
    ("numbers", "code", "stated"),
    [
        ({"model": 0, "trainer": 1}, "number_too_small", {"flag": "--model-nodes", "at_least": 1}),
        ({"model": 1, "trainer": 0}, "number_too_small", {"flag": "--trainer-nodes", "at_least": 1}),
        ({"model": 1, "trainer": 1, "env_workers": 0}, "number_too_small", {"flag": "--env-workers", "at_least": 1}),
        ({"model": 1, "trainer": 1, "gpus": -1}, "number_too_small", {"flag": "--gpus-per-node", "at_least": 0}),
        ({"model": 1, "trainer": 1, "servers": 3}, "servers_per_node", {"servers": 3}),
        ({"model": 1, "trainer": 1, "gpus": 6, "servers": 4}, "gpus_per_server", {"gpus": 6, "servers": 4}),
    ],
)
def test_numbers_that_cannot_be_placed_are_refused(numbers: dict[str, int], code: str, stated: dict[str, Any]) -> None:
    with raises(ConfigError, code, **stated):
        Nodes(**numbers)


@pytest.mark.parametrize("time", ["soon", "1:2", "4h", ""])
def test_time_limit_has_the_form_of_slurm(home: Path, time: str) -> None:
    with raises(ConfigError, "time_limit", time=time):
        Job.read("quickstart", Nodes(1, 1), "tiny", {"GRISTMILL_CONFIG_DIR": str(ROOT / "configs")}, time=time)


@pytest.mark.parametrize(
    ("time", "long_enough"),
    [
        ("9", False),
        ("9:59", False),
        ("0:09:59", False),
        ("0-0:09:59", False),
        ("0", True),
        ("10", True),
        ("10:00", True),
        ("0:10:00", True),
        ("0-0:10", True),
        ("1:00:00", True),
        ("1-0", True),
    ],
)
def test_time_limit_leaves_time_to_train(home: Path, time: str, long_enough: bool) -> None:
    """A shorter job would return to the queue for ever. Slurm takes 0 as no limit."""
    places = {"GRISTMILL_CONFIG_DIR": str(ROOT / "configs")}
    if long_enough:
        assert f"#SBATCH --time={time}" in Job.read("quickstart", Nodes(1, 1), "tiny", places, time=time).script()
    else:
        with raises(ConfigError, "time_limit_short", time=time, at_least=600):
            Job.read("quickstart", Nodes(1, 1), "tiny", places, time=time)


def test_run_id_is_that_of_the_services(home: Path) -> None:
    assert job(home).run_id == "quickstart"
    (home / "mine.yaml").write_text("run_id: of-file\n")
    assert Job.read("mine.yaml", Nodes(1, 1), "tiny", {}).run_id == "of-file"
    assert Job.read("mine.yaml", Nodes(1, 1), "tiny", {"GRISTMILL_RUN_ID": "of-environment"}).run_id == "of-environment"


def test_model_exists_and_is_that_of_the_configuration(home: Path) -> None:
    places = {"GRISTMILL_CONFIG_DIR": str(ROOT / "configs")}
    for model in ("tinyy", "./nope/x", "/nope/x"):
        with raises(ModelError, "model_missing", model=model):
            Job.read("quickstart", Nodes(1, 1), model, places)
    _program(home / "bin" / "apptainer", "")
    assert Job.read("quickstart", Nodes(1, 1), "/of/image", places, image="i").model == "/of/image"
    other = ["server_configs.0.model_name=tiny"]
    with raises(ConfigError, "model_mismatch", model_name="tiny", served="smollm2"):
        Job.read("quickstart", Nodes(1, 1), "smollm2", places, assignments=other)
    (home / "tiny").mkdir()
    assert Job.read("quickstart", Nodes(1, 1), "tiny", places).model == "tiny"
    folder = home / "models" / "mine"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    for image in (None, "registry.example/{service}"):
        found = Job.read("quickstart", Nodes(1, 1), "models/mine", places, image=image)
        assert found.model == str(folder)
    assert f"{folder}:{folder}" in found._mounts()


def test_missing_programs_are_named(home: Path) -> None:
    shutil.rmtree(home / "bin")
    with raises(ConfigError, "redis_missing"):
        job(home)
    shutil.rmtree(home / ".venv-model")
    with raises(ConfigError, "setup_missing", path=home / ".venv-model" / "bin" / "python"):
        job(home)


def test_containers_need_pyxis_or_apptainer(home: Path) -> None:
    programs = home / "cluster"

    def which(name: str) -> str | None:
        return shutil.which(name, path=str(programs))

    with raises(ConfigError, "containers_missing"):
        containers(which)
    _program(programs / "srun", "--het-group")
    with raises(ConfigError, "containers_missing"):
        containers(which)
    _program(programs / "apptainer", "")
    assert containers(which) == "apptainer"
    _program(programs / "srun", "--container-image=[USER@]")
    assert containers(which) == "pyxis"


def test_submission_outside_a_cluster_is_an_error(home: Path) -> None:
    with raises(GristmillError, "slurm_missing"):
        submit(job(home))
    assert not (home / ".gristmill").exists()


def test_sbatch_that_refuses_the_job_is_quoted(home: Path) -> None:
    sbatch = home / "bin" / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 'invalid partition specified: gpu' >&2\nexit 1\n")
    sbatch.chmod(0o755)
    with raises(GristmillError, "submit_failed", answer="invalid partition specified: gpu"):
        submit(job(home))


def test_settings_of_the_command_line_reach_the_environment_as_they_are(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["trainer.learning_rate=1e-5", "dataset.system_prompt=two words; $HOME", "run_id=other"]
    assert main([*QUICKSTART, *(word for one in given for word in ("--set", one))]) == 0
    script = capsys.readouterr().out
    (line,) = re.findall(r"^SETTINGS=.*$", script, re.MULTILINE)
    shown = subprocess.run(
        ["/bin/bash", "-uc", f'{line}\nprintf "%s\\n" "${{SETTINGS[@]}}"'], capture_output=True, text=True, check=True
    )
    assert shown.stdout.splitlines() == [word for one in given for word in ("--set", one)]
    assert values(script)["RUN"] == "other"


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("grop_size: 3", "unknown_key"),
        ("run_id: ../../x", "invalid_settings"),
        ("dataset: {dataset_path: rows.jsonl, prompt_field: q, reward_functions: [acuracy]}", "unknown_reward"),
    ],
)
def test_configuration_that_cannot_run_is_refused_before_the_submission(
    home: Path, capsys: pytest.CaptureFixture[str], line: str, code: str
) -> None:
    (home / "mine.yaml").write_text(f"{line}\n")
    assert main([QUICKSTART[0], "mine.yaml", *QUICKSTART[2:]]) == 1
    assert f"[{code}]" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a%x", "a\\b", "a\nb"])
def test_folder_that_slurm_does_not_write_to_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (home / name).mkdir()
    monkeypatch.chdir(home / name)
    with raises(ConfigError, "slurm_folder", path=home / name / ".gristmill/slurm/quickstart"):
        job(home)


@pytest.mark.parametrize("port", ["99999", "-5", "0"])
def test_port_of_the_api_is_a_port(home: Path, capsys: pytest.CaptureFixture[str], port: str) -> None:
    assert main([*QUICKSTART, f"--api-port={port}"]) == 1
    assert "[port_invalid]" in capsys.readouterr().err


def test_configuration_for_a_job_needs_no_job(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "mine.yaml").write_text("slurm: true\n")
    assert main(["--runs", "shared", QUICKSTART[0], "mine.yaml", *QUICKSTART[2:]]) == 0
    assert values(capsys.readouterr().out)["GRISTMILL_RUNS_DIR"] == str(home / "shared")


def test_wrong_setting_is_refused_before_the_submission(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICKSTART, "--set", "trainer.learnig_rate=1"]) == 1
    error = capsys.readouterr().err
    assert "[unknown_key]" in error
    assert "'learning_rate'" in error
