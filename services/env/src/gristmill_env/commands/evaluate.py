"""`evaluate`: measures a model on a fixed set of prompts. Needs a model server; reports to the API if one answers."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from pathlib import Path

import msgspec
from rich.console import Console

from gristmill import ApiError, ApiUnreachable, PolicyVersion, RunRecord
from gristmill.disk import write_file
from gristmill.folders import EVALUATION_FILE, EVALUATION_RESULTS_FILE
from gristmill_env.commands import EvaluateOptions
from gristmill_env.console import Steps
from gristmill_env.errors import EvaluationError
from gristmill_env.evaluation.compare import Comparison, compare
from gristmill_env.evaluation.folder import EvaluationFolder
from gristmill_env.evaluation.plan import (
    count_training_rows,
    evaluation_task,
    evaluations_folder,
    has_evaluation_set,
    make_plan,
    number_of_prompts,
    training_dataset,
)
from gristmill_env.evaluation.report import show, show_comparison
from gristmill_env.evaluation.results import SOURCE_BY_HAND, Evaluated, row
from gristmill_env.evaluation.run import evaluate, weight_label
from gristmill_env.rollouts.groups import is_version
from gristmill_env.run_settings import RunSettings
from gristmill_env.session import connect_api, open_session

logger = logging.getLogger(__name__)

COMPARISON_FILE = "comparison.json"
_API_PATIENCE = 5.0


async def run_evaluate(run: RunSettings, options: EvaluateOptions, console: Console) -> None:
    """Evaluates or compares, as the flags request. Raises GristmillError."""
    if len(options.compare) == 2:
        if options.resume:
            raise EvaluationError(
                "resume_without_evaluation", "--compare of two evaluations evaluates nothing: leave --resume out"
            )
        _compare(options.compare[0], options.compare[1], options.out, console)
        return
    for folder in options.compare:
        compare(folder, folder)  # reports a mistyped folder before the evaluation instead of after it
    evaluated = await _evaluate(run, options)
    show(console, evaluated)
    await _tell(run, evaluated)
    for folder in options.compare:
        _compare(folder, evaluated.folder, evaluated.folder, console)


async def _evaluate(run: RunSettings, options: EvaluateOptions) -> Evaluated:
    config, folder = run.config, _folder(run, options)
    async with open_session(run, [evaluation_task(run)]) as session:
        (source,) = session.sources
        task, dataset, scorer = source.task, source.task.dataset, source.task.scorer
        label = await weight_label(session.server)
        creation = None if (record := await _training(run, label)) is None else record.creation
        training = training_dataset(run) if has_evaluation_set(config.dataset) else dataset
        prompts = number_of_prompts(config.dataset, len(dataset))
        seen = None if training is None else await asyncio.to_thread(count_training_rows, dataset, prompts, training)
        plan = make_plan(run, task, model=session.served.name, weights=label, creation=creation, training_rows=seen)
        with EvaluationFolder(folder, plan, resume=options.resume) as file:
            progress = Steps("prompts evaluated", plan.prompts, done=len(file.done))
            return await evaluate(
                file, dataset, source.generator.generate_and_score, scorer=scorer,
                workers=config.max_eval_workers, progress=progress,
            )  # fmt: skip


def _folder(run: RunSettings, options: EvaluateOptions) -> Path:
    if options.out is not None:
        return options.out
    base = evaluations_folder(run)
    if not options.resume:
        return base / f"evaluate-{time.strftime('%Y-%m-%dT%H-%M-%S')}"
    begun = sorted(path.parent for path in base.glob(f"evaluate-*/{EVALUATION_FILE}"))
    unfinished = [folder for folder in begun if not (folder / EVALUATION_RESULTS_FILE).exists()]
    if not unfinished:
        raise EvaluationError(
            "nothing_to_resume",
            f"no unfinished evaluation in {base}: leave --resume out, or name its folder by --out",
            folder=base,
        )
    return unfinished[-1]


async def _training(run: RunSettings, label: str | None) -> RunRecord | None:
    """Returns the record of this run if its training had the weights `label`; None if not, or if no API answers."""
    if label is None or not is_version(label):
        return None
    try:
        async with connect_api(run, _API_PATIENCE) as api:
            record = await api.get_run(run.run_id)
    except (ApiError, ApiUnreachable) as error:
        logger.warning("the API is not told of this evaluation: %s", error)
        return None
    if record.version is None or PolicyVersion.parse(label) > PolicyVersion.parse(record.version):
        logger.warning("run %s never had the weights %s; the API is not told", run.run_id, label)
        return None
    return record


async def _tell(run: RunSettings, evaluated: Evaluated) -> None:
    """Reports to the API if the weights are a version of this training, because then a step exists to plot at.

    The API refuses the report if the run was created again meanwhile.
    """
    label, creation = evaluated.plan.weights, evaluated.plan.creation
    if label is None or creation is None:
        return
    try:
        async with connect_api(run, _API_PATIENCE) as api:
            step, values = PolicyVersion.parse(label).step, row(evaluated)
            await api.report_metrics(run.run_id, SOURCE_BY_HAND, step, values, creation=creation)
    except (ApiError, ApiUnreachable) as error:
        logger.warning("the API is not told of this evaluation: %s", error)


def _compare(first: Path, second: Path, out: Path | None, console: Console) -> Comparison:
    comparison = compare(first, second)
    show_comparison(console, comparison)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        made = msgspec.to_builtins(dataclasses.asdict(comparison), enc_hook=str)
        write_file(out / COMPARISON_FILE, msgspec.json.format(msgspec.json.encode(made), indent=2))
    return comparison
