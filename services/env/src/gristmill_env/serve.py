"""`serve`: opens or joins the run, and feeds it until it is finished."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gristmill import Client, ConfigError, RunRecord, RunState
from gristmill.settings import load_yaml
from gristmill_env.evaluation.plan import has_evaluation_set
from gristmill_env.evaluation.run import Evaluations, NoEvaluations, RunEvaluations, RunMeasure, version_left
from gristmill_env.inference import ModelServers, Thinking
from gristmill_env.launch import Launch
from gristmill_env.registration import holder_name, registered, tell_row_count
from gristmill_env.rollouts.generator import Roller
from gristmill_env.saved import GroupSaver, GroupWriter
from gristmill_env.session import Task, meet_model
from gristmill_env.settings import EnvConfig
from gristmill_env.stall import watched
from gristmill_env.tracking import Observers, WandbTracker
from gristmill_env.worker import Worker

logger = logging.getLogger(__name__)

_STARTUP_PATIENCE = 300.0
_HOW_TO_BEGIN = (
    "to begin another, give it a name: RUN_ID=<name> (GRISTMILL_RUN_ID outside Compose) or --run_id <name>, "
    "for the trainer too"
)


async def serve(launch: Launch, environ: Mapping[str, str]) -> None:
    """Feeds the run until it is finished; returns at once if it is finished already. Raises GristmillError."""
    config, run_id, token = launch.config, launch.run_id, launch.deployment.api_token
    check_step_size(launch)
    for warning in config.warnings():
        logger.warning("%s", warning)
    task = Task.load(launch)
    patience = config.startup_patience or _STARTUP_PATIENCE
    servers = ModelServers(config.server_configs, patience=config.patience, thinking=Thinking.of(config))
    async with task, servers as server:
        served, roller = await meet_model(launch, task, server, patience)
        server.refuse_text_only()
        measure = RunMeasure(launch, served.name) if _evaluates(config) else None
        recorded = config.recorded(served.name)
        async with Client(config.rollout_server_url, patience=patience, token=token) as api:
            record = await api.create_run(run_id, recorded, config.group_size, launch.deployment.stack)
        if record.state == RunState.FINISHED:
            logger.info("run %s is already finished at version %s; %s", run_id, record.version, _HOW_TO_BEGIN)
            if measure is not None:
                await _evaluate_afterwards(launch, task, record, measure, server, roller, recorded, environ)
            return
        logger.info("run %s is open at version %s", run_id, record.version or "none yet: waiting for a trainer")
        holder = holder_name()
        async with (
            Client(config.rollout_server_url, patience=config.patience, token=token) as api,
            # Registers at once, because a run without a live environment may be replaced by another run.
            registered(api, run_id, holder, config),
        ):
            with contextlib.ExitStack() as closing:
                observers = _observers(launch, task, recorded, environ, groups_file(launch), served.name)
                closing.callback(observers.close)
                await tell_row_count(api, run_id, task.dataset.label, len(task.dataset))
                worker = Worker(
                    config, run_id, holder, api=api, server=server, dataset=task.dataset, roller=roller,
                    observers=observers, evaluations=_evaluations(launch, measure, holder, api, observers),
                )  # fmt: skip
                closing.callback(lambda: logger.info("run %s: %s", run_id, worker.tally))
                async with watched():
                    await worker.run()
    logger.info("run %s is finished", run_id)


def check_step_size(launch: Launch) -> None:
    """Checks that a training step takes whole groups, if the run sets its step size and trainer.yaml exists here.

    A run that sets no step size may leave it to the trainer's command line, which is unknown here. Raises ConfigError.
    """
    sets_step_size = not {"batch_size", "gradient_accumulation_steps"}.isdisjoint(launch.config.trainer_block())
    if not sets_step_size or not launch.trainer_file.is_file():
        return
    try:
        defaults = load_yaml(launch.trainer_file)
    except ConfigError as error:  # trainer.yaml may need a variable that only the trainer has
        logger.warning("the step size is not compared with group_size: %s", error)
        return
    launch.check_trainer(defaults)


async def _evaluate_afterwards(
    launch: Launch, task: Task, record: RunRecord, measure: RunMeasure, server: ModelServers, roller: Roller,
    recorded: dict[str, Any], environ: Mapping[str, str],
) -> None:  # fmt: skip
    config, run_id, token = launch.config, launch.run_id, launch.deployment.api_token
    async with Client(config.rollout_server_url, patience=config.patience, token=token) as api:
        version = await version_left(api, record, server)
        if version is None:
            return
        with contextlib.closing(_observers(launch, task, recorded, environ)) as observers:
            evaluations = RunEvaluations(config, run_id, holder_name(), api, measure, observers)
            await evaluations.at_end(version, functools.partial(roller.roll, evaluation=True))


def _observers(
    launch: Launch, task: Task, recorded: dict[str, Any], environ: Mapping[str, str],
    groups: Path | None = None, model: str = "",
) -> Observers:  # fmt: skip
    """`groups`: the file for saved groups. `model`: the model's name at the server, which the file repeats."""
    config = launch.config
    tracker = saver = None
    if config.use_wandb:
        folder, decision = launch.deployment.runs_dir, task.scorer.decision
        tracker = functools.partial(
            WandbTracker, launch.run_id, config, recorded, folder, environ, decision=decision
        )  # fmt: skip
    if groups is not None:

        def saver() -> GroupSaver:
            return GroupSaver(GroupWriter(groups), run=launch.run_id, model=model, config=config)

    return Observers(tracker, saver)


def _evaluates(config: EnvConfig) -> bool:
    return config.steps_per_eval > 0 and has_evaluation_set(config.dataset)


def _evaluations(
    launch: Launch, measure: RunMeasure | None, holder: str, api: Client, observers: Observers
) -> Evaluations:
    if measure is None:
        return NoEvaluations()
    logger.info("evaluation every %d steps on %s", launch.config.steps_per_eval, measure.label)
    return RunEvaluations(launch.config, launch.run_id, holder, api, measure, observers)


def groups_file(launch: Launch) -> Path | None:
    """Returns the file that stores the submitted groups as text; None if none is configured."""
    path = launch.config.data_path_to_save_groups
    return None if path is None else launch.run_folder / path
