"""The checks of a run that need no service, or only the store. Each raises an error with the remedy."""

from __future__ import annotations

import errno
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gristmill import ApiError, PolicyVersion, RunState
from gristmill.internal.config_files import load_yaml
from gristmill.internal.lines import read_jsonl
from gristmill.internal.metrics import METRICS_FILE
from gristmill.internal.settings import merge, parse
from gristmill_cli.local.options import ROOT, command, serve_command
from gristmill_cli.local.processes import LocalStackError, listens
from gristmill_cli.local.redis_server import redis_server
from gristmill_cli.local.services import MODEL_PYTHON, Services
from gristmill_env.run_settings import RunSettings
from gristmill_env.session import load_task
from gristmill_model.settings import served_name
from gristmill_trainer.errors import CheckpointError
from gristmill_trainer.hooks import load_function
from gristmill_trainer.settings import TrainerSettings


@dataclass(frozen=True)
class Plan:
    """A run that passed the checks."""

    run_id: str
    training_steps: int
    trainer_grace: float
    """Seconds that the trainer may take for its step after a stop signal."""


def check(services: Services) -> Plan:
    """Checks config, rewards, local data, settings of the trainer, the model's name, ports and programs.

    Raises GristmillError, which names the mistake and the remedy.
    """
    run = RunSettings.read(services.env_flags(), {**os.environ, **services.environ}, "gristmill run")
    settings = _trainer_settings(services, run)
    _check_named_files(services, settings, run.run_id)
    _check_finished(services, run.run_id, settings.training_steps)
    for part in run.by_source():
        if part.config.dataset.dataset_path is not None:
            load_task(part)  # The environment checks a data set on a hub, because its download may take long.
    logs = services.runs_dir / run.run_id / "logs"
    for folder in (logs, *(services.state / name for name in ("redis", "models", "weights"))):
        check_folder(folder)
    _check_ports(services)
    _check_model(services, run)
    redis_server()
    return Plan(run.run_id, settings.training_steps, settings.stop_grace_seconds)


def check_store(services: Services, plan: Plan) -> None:
    """Refuses a run that is finished in the store but not in its files, for example after it was closed by hand."""
    try:
        with services.admin() as api:
            record = api.get_run(plan.run_id)
    except ApiError as error:
        if error.code != "run_missing":
            raise
        return
    if record.state == RunState.FINISHED and plan.training_steps <= (record.training_steps or plan.training_steps):
        version = PolicyVersion.parse(record.version) if record.version else None
        raise _finished(services, plan.run_id, version.step if version else 0)


def steps_done(folder: Path) -> int:
    """Returns the last step in the metrics of the run in `folder`, 0 before the first step."""
    metrics = folder / METRICS_FILE
    return max((row["step"] for row in read_jsonl(metrics)), default=0) if metrics.exists() else 0


def check_folder(folder: Path) -> None:
    """Checks that files can be written into the folder, or into the nearest folder above it if it does not exist yet.

    Creates nothing that stays. Raises OSError.
    """
    while not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(4096))
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(folder)) from error


def _trainer_settings(services: Services, run: RunSettings) -> TrainerSettings:
    file = ROOT / "configs" / "trainer.yaml"
    layers = merge(merge(load_yaml(file), run.config.trainer_block()), services.trainer_settings())
    where = f"trainer settings ({file.name}, trainer: block of {run.config_path}, command line)"
    settings = parse(TrainerSettings, layers, where)
    settings.check_whole_groups(run.config.group_size, where)
    return settings


def _check_named_files(services: Services, settings: TrainerSettings, run_id: str) -> None:
    """Loads the user's loss, and looks for the checkpoint to begin with, which the run may have pruned since then."""
    if settings.policy_loss is not None:
        load_function(settings.policy_loss, "policy_loss")
    checkpoints = services.runs_dir / run_id / "checkpoints"
    named = settings.resume not in ("auto", "never") and not any(checkpoints.glob("step-*"))
    if named and not Path(settings.resume, "trainer_state.json").is_file():
        raise CheckpointError(
            "checkpoint_missing",
            f"--resume names {settings.resume}, which is not a folder of a checkpoint; "
            "name one such as runs/RUN/checkpoints/step-000020",
            resume=settings.resume,
        )


def _check_finished(services: Services, run_id: str, training_steps: int) -> None:
    folder = services.runs_dir / run_id
    steps = steps_done(folder)
    if not services.options.fresh and steps >= training_steps and (folder / "model").is_dir():
        raise _finished(services, run_id, steps)


def _finished(services: Services, run_id: str, steps: int) -> LocalStackError:
    options = services.options
    model = services.runs_dir / run_id / "model"
    here = f"its model is {model}" if model.is_dir() else f"{model.parent} has no model"
    commands = {
        "train it longer": command(options, training_steps=max(2 * steps, options.training_steps or 0, 20)),
        "train it again": command(options, fresh=True),
        "train another run of it": command(options, run_id=f"{run_id}-2"),
    }
    if model.is_dir():
        commands["serve its model"] = serve_command(options, model, stays=services.warm.record() is not None)
    lines = [f"  {purpose + ':':<24} {line}" for purpose, line in commands.items()]
    return LocalStackError(
        "run_finished",
        "\n".join([f"run {run_id} is finished after {steps} steps; {here}", *lines]),
        run=run_id,
        steps=steps,
    )


def _check_ports(services: Services) -> None:
    options = services.options
    if listens(options.api_port):
        raise LocalStackError(
            "port_taken",
            f"port {options.api_port} of the trajectory API is taken: stop the process that listens there "
            "(another `gristmill run` or `docker compose up`?), or choose another port with --api_port",
            port=options.api_port,
        )
    if listens(options.model_port) and not services.model_answers():
        raise LocalStackError(
            "port_taken",
            f"port {options.model_port} of the model server is taken by a process that does not answer as "
            "a model server: stop it, or choose another port with --model_port",
            port=options.model_port,
        )


def _check_model(services: Services, run: RunSettings) -> None:
    """Compares the model that the server has, or will load, with the model that this command needs."""
    record, named_model = services.warm.record(), services.named_model
    if record is not None:
        services.warm.check(record, named_model, os.environ)
        return
    if served := services.served_models():  # The environment compares them with the configuration.
        if named_model is not None and services.options.model_name is None and served_name(named_model) not in served:
            raise LocalStackError(
                "model_mismatch",
                f"the model server that answers at {services.model_url} has the model {served[0]!r}, and this command "
                f"needs {named_model!r}: stop that server, or choose another port with --model_port",
                model_name=named_model,
                served=served[0],
            )
        return
    name = served_name(services.options.model)
    wanted = run.config.server.model_name
    if wanted not in (None, name):
        raise LocalStackError(
            "model_mismatch",
            f"{run.config_path} trains the model {wanted!r}, but the model server would load {name!r}: "
            f"add --model {wanted}",
            model_name=wanted,
            served=name,
        )
    if not MODEL_PYTHON.exists():
        raise LocalStackError("setup_missing", f"no {MODEL_PYTHON}: run `make setup` first", path=MODEL_PYTHON)
