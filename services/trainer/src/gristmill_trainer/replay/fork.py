"""`gristmill fork RUN --at 37 --set learning_rate=1e-5`: a new live run that begins from a step of a recorded run.

The folder of the new run receives the checkpoint (`origin/step-000037`), its configuration (`fork.yaml`) and
`fork.json`, from which the page draws both curves on one axis. The new run has its own steps, schedule and data order.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gristmill import ApiUnreachable, Hyperparameters, RunRecord, SyncClient
from gristmill.folders import FORK_FILE, ORIGIN_FOLDER
from gristmill.internal.assignments import put
from gristmill.internal.disk import write_file
from gristmill.internal.redaction import redacted
from gristmill.internal.settings import merge, parse
from gristmill.internal.signals import ending_on_signals
from gristmill_trainer.checkpoint.contents import MANIFEST, Checkpoint
from gristmill_trainer.checkpoint.digests import file_digests
from gristmill_trainer.replay.recorded import RecordedRun, ReplayError, check_step
from gristmill_trainer.replay.retrainer import recorded_training
from gristmill_trainer.replay.untrusted import dollars_kept, recorded_environment
from gristmill_trainer.settings import MAY_CHANGE, OF_TRAINING, TrainerSettings

_CONFIG = "fork.yaml"
_LAST_SECONDS = 60.0
"""Longest time for the second process after the first one has ended."""


@dataclass(frozen=True)
class Fork:
    """A prepared fork."""

    run_id: str
    config: Path
    """The environment's configuration."""
    checkpoint: Path
    """The checkpoint that the trainer resumes from."""
    settings: Mapping[str, str]
    """Settings of the trainer that no run may set, as `settings.OF_TRAINING` has them."""

    @property
    def flags(self) -> list[str]:
        """The trainer's command line."""
        given = {"resume": str(self.checkpoint), **self.settings}
        return [word for name, value in given.items() for word in (f"--{name}", value)]


def prepare(
    run: RecordedRun,
    at: int,
    settings: Mapping[str, Any],
    folder: Path,
    config_dir: Path,
    say: Callable[[str], None],
) -> Fork:
    """Writes `folder`, the folder of a new run, whose name is the run's id. Raises ReplayError and UntrustedError.

    `settings`: hyperparameters and settings of `OF_TRAINING` by name, and settings of the environment with dots, such
    as dataset.temperature.
    `config_dir`: the folder in which relative data sets are searched.
    """
    check_step("--at", at, 1, run.last_step)
    record = run.folder.record()
    if record is None:
        raise ReplayError(
            "settings_missing",
            f"run {run.run_id} has no run.json, from which a fork takes the environment's settings. Begin a run by "
            f"hand with --resume {run.folder.folders[0] / 'checkpoints'}/step-{at:06d}",
            run=run.run_id,
        )
    if folder.exists():
        raise ReplayError("folder_taken", f"{folder} exists; name another run id: --id NAME", folder=folder)
    settings = {_of_trainer(name): value for name, value in settings.items()}
    of_trainer = {name: value for name, value in settings.items() if name in OF_TRAINING}
    trainer = run.settings(at, of_trainer)
    of_env = {name: value for name, value in settings.items() if name not in OF_TRAINING}
    config = _config(run, record, trainer, at, of_env, folder.name, config_dir)
    folder.mkdir(parents=True)
    try:
        checkpoint = folder / ORIGIN_FOLDER / f"step-{at:06d}"
        copy_checkpoint(run, at, checkpoint, say)
        path = folder / _CONFIG
        write_file(path, yaml.safe_dump(config, sort_keys=False).encode())
        about = {"run": run.run_id, "step": at, "settings": dict(settings)}
        write_file(folder / FORK_FILE, f"{json.dumps(about, indent=2)}\n".encode())
    except BaseException:
        shutil.rmtree(folder)
        raise
    kept = trainer.model_dump(include=set(OF_TRAINING), exclude_none=True)
    return Fork(folder.name, path, checkpoint, {name: str(value) for name, value in kept.items()})


def can_start(api: str, token: str | None) -> bool:
    """Whether the API answers and the environment's package is installed here, so that `start` works.

    Raises ReplayError if another run is open at the API: the fork's trainer would take that run. Raises ApiError if the
    API refuses the token.
    """
    if importlib.util.find_spec("gristmill_env") is None:
        return False
    try:
        with SyncClient(api, token=token, patience=0) as client:
            taken = client.open_run(wait=0)
    except ApiUnreachable:
        return False
    if taken is not None:
        raise ReplayError(
            "run_open",
            f"run {taken.run_id} is open at {api}, and one stack trains one run at a time. Wait until the run ends, or "
            f"end it: gristmill close {taken.run_id}",
            run=taken.run_id,
        )
    return True


def start(fork: Fork, api: str, runs_dir: Path) -> int:
    """Runs the environment and the trainer of a fork to the end. Returns 0, or the exit code of the one that failed.

    A signal to this process, such as Ctrl-C, stops both, which then write a checkpoint.
    """
    environ = {**os.environ, "GRISTMILL_API_URL": api, "GRISTMILL_RUNS_DIR": str(runs_dir), "GRISTMILL_RUN_ID": ""}
    commands = [
        ["gristmill_trainer", *fork.flags],
        ["gristmill_env", "serve", "--config", str(fork.config)],
    ]
    processes: list[subprocess.Popen[bytes]] = []
    with ending_on_signals():
        try:
            for command in commands:  # In a session of their own: a terminal sends Ctrl-C to its whole group.
                program = [sys.executable, "-m", *command]
                processes.append(subprocess.Popen(program, env=environ, start_new_session=True))
            return _wait(processes)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.terminate()
            for process in processes:
                process.wait()


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    deadline: float | None = None
    while True:
        codes = [process.poll() for process in processes]
        if failed := [code for code in codes if code]:
            return failed[0]
        if None not in codes or (deadline is not None and time.monotonic() > deadline):
            return 0
        if 0 in codes and deadline is None:
            deadline = time.monotonic() + _LAST_SECONDS
        time.sleep(0.2)


def _config(
    run: RecordedRun,
    record: RunRecord,
    recorded: TrainerSettings,
    at: int,
    settings: Mapping[str, Any],
    run_id: str,
    config_dir: Path,
) -> dict[str, Any]:
    """Returns the environment's configuration with the trainer's block. Raises ReplayError and ConfigError."""
    hyperparameters = {name: value for name, value in settings.items() if name in Hyperparameters.model_fields}
    of_env: dict[str, Any] = {}
    for name, value in settings.items():
        if name in hyperparameters:
            continue
        if name == "run_id" or name.split(".")[0] == "trainer" or not put(of_env, name.split("."), value):
            raise ReplayError(
                "fork_setting",
                f"--set {name} cannot be set: --id names the new run, only hyperparameters and "
                f"{', '.join(sorted(OF_TRAINING))} are of the trainer, and a setting is given once",
                setting=name,
            )
    # The trainers of the first steps of an extended run had fewer steps.
    steps = run.facts(run.last_step).settings.get("training_steps", recorded.training_steps)
    steps_left = max(1, steps - at)
    # A null of how the machine was used leaves this machine's trainer.yaml its value.
    trainer = {
        name: value
        for name, value in recorded.model_dump(include=set(Hyperparameters.model_fields)).items()
        if value is not None or name not in MAY_CHANGE
    }
    trainer = merge({**trainer, "training_steps": steps_left}, hyperparameters)
    parse(Hyperparameters, trainer, "--set")
    env = {name: value for name, value in record.env.items() if name not in ("trainer", "model")}
    of_env = at_each_source(of_env, env)
    env = dollars_kept(recorded_environment(env, of_env, config_dir, trust=run.trust))
    config = merge({**env, "group_size": record.group_size, "run_id": run_id, "steps_per_eval": 0}, of_env)
    if secrets := list(redacted(config)):
        raise ReplayError(
            "secret_missing",
            f"run.json does not keep the secrets in the settings of run {run.run_id}: {', '.join(secrets)}. Set each "
            f"with --set, such as --set {secrets[0]}=VALUE",
            run=run.run_id,
            settings=secrets,
        )
    return {**in_file(config, config_dir), "trainer": trainer}


def _of_trainer(name: str) -> str:
    """Returns the name of a setting without the section that it has in a configuration, if it is the trainer's."""
    inner = name.removeprefix("trainer.")
    return inner if inner in Hyperparameters.model_fields or inner in OF_TRAINING else name


def at_each_source(changes: Mapping[str, Any], env: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the changes with those of `dataset` at each source too.

    `env`: a record, which has the complete settings of each source. These would override the settings of the run.
    """
    sources, own = env.get("sources"), changes.get("sources", {})
    if not isinstance(sources, dict) or "dataset" not in changes:
        return dict(changes)
    shared = {"dataset": changes["dataset"]}
    return {**changes, "sources": {**own, **{name: merge(shared, own.get(name, {})) for name in sources}}}


def in_file(settings: Mapping[str, Any], config_dir: Path) -> dict[str, Any]:
    """Returns recorded settings of an environment in the form of a configuration file in another folder.

    Paths of data sets and of code begin at the root, and `sources`, which a record has by name, are a list.
    """
    written: dict[str, Any] = _with_paths(settings, config_dir)
    dataset = written.get("dataset")
    if isinstance(dataset, dict) and dataset.get("dataset_path"):
        there = config_dir / dataset["dataset_path"]
        path = str(there.resolve() if there.exists() else dataset["dataset_path"])
        written["dataset"] = {**dataset, "dataset_path": path}
    if isinstance(sources := written.get("sources"), dict):
        written["sources"] = [{"name": name, **in_file(source, config_dir)} for name, source in sources.items()]
    return written


def _with_paths(value: Any, config_dir: Path) -> Any:
    """Returns a value in which FILE.py:NAME names a file of `config_dir` or of this folder by its whole path."""
    if isinstance(value, Mapping):
        return {name: _with_paths(inner, config_dir) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_with_paths(inner, config_dir) for inner in value]
    file, colon, name = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if not file.endswith(".py"):
        return value
    there = next((folder / file for folder in (config_dir, Path()) if (folder / file).is_file()), None)
    return value if there is None else f"{there.resolve()}{colon}{name}"


def copy_checkpoint(run: RecordedRun, at: int, target: Path, say: Callable[[str], None]) -> None:
    """Copies the checkpoint after `at` steps, or trains up to it again if it is not on disk any more."""
    found = next((record for record in run.on_disk() if record.step == at), None)
    if found is not None:
        source = run.load(found).path
        # Only the files that the manifest lists: another file may be code, at a path that a record can name.
        for name in [*file_digests(source), MANIFEST]:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name, follow_symlinks=False)
        return
    with recorded_training(run) as trainer:
        begun = trainer.begin(at)
        say(f"the checkpoint of step {at} is not on disk: trains steps {begun + 1} to {at} again")
        last: Checkpoint | None = None
        for trained_step in trainer.steps(at):
            last = trained_step.checkpoint or last
            if files := trained_step.differing_files():
                name = f"the checkpoint of step {trained_step.step}"
                say(f"warning: {name} differs from the original in {', '.join(files)}")
        assert last is not None
        shutil.copytree(last.path, target)
