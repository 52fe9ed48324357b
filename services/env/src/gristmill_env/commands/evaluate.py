"""`evaluate`: measures a model on a fixed set of prompts. Needs a model server; reports to the API if one answers."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
from rich.console import Console

from gristmill import ApiError, ApiUnreachable, PolicyVersion, RunRecord
from gristmill.folders import EVALUATION_FILE, EVALUATION_RESULTS_FILE
from gristmill.internal.disk import write_file
from gristmill.internal.settings import did_you_mean
from gristmill_env.commands import EvaluateOptions
from gristmill_env.errors import EvaluationError
from gristmill_env.evaluation.compare import compare
from gristmill_env.evaluation.folder import EvaluationFolder
from gristmill_env.evaluation.plan import (
    count_training_rows,
    evaluation_tasks,
    evaluations_folder,
    make_plan,
    number_of_prompts,
    training_datasets,
)
from gristmill_env.evaluation.report import show, show_comparison
from gristmill_env.evaluation.results import SOURCE_BY_HAND, Evaluated, row
from gristmill_env.evaluation.run import evaluate, weight_label
from gristmill_env.rollouts.groups import is_version
from gristmill_env.run_settings import RunSettings
from gristmill_env.session import Task, connect_api, open_session
from gristmill_env.settings.task import OWN_EVALUATION

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
    tasks, found = chosen_tasks(run, options), dict[str | None, Evaluated]()
    for task in tasks:
        folder = folder_of(task, options, several=len(tasks) > 1)
        found[task.name] = evaluated = await _evaluate(run, task, folder, resume=options.resume)
        show(console, evaluated)
    await report_scores(run, found)
    for folder in options.compare:
        _compare(folder, evaluated.folder, evaluated.folder, console)


def chosen_tasks(run: RunSettings, options: EvaluateOptions) -> list[Task]:
    """Loads the evaluations that the flags ask for. Raises EvaluationError and as `Task.load`."""
    names = [_word(name) for name in run.config.by_evaluation()]
    if options.only is not None and options.only not in names:
        there = f"there are {', '.join(names)}" if names else "the run has no evaluations with names"
        raise EvaluationError(
            "unknown_evaluation",
            f"no evaluation '{options.only}'; {there}.{did_you_mean(options.only, names)}",
            name=options.only,
            known=names,
        )
    if len(names) > 1 and options.only is None and (options.resume or options.compare):
        raise EvaluationError(
            "several_evaluations",
            f"--resume and --compare are of one evaluation; choose one of {', '.join(names)} with --only",
            known=names,
        )
    return [task for task in evaluation_tasks(run) if options.only in (None, _word(task.name))]


def _word(name: str | None) -> str:
    """Returns the word of `--only` for an evaluation. That of the run's own data set has no name."""
    return OWN_EVALUATION if name is None else name


async def _evaluate(run: RunSettings, task: Task, folder: Path, *, resume: bool) -> Evaluated:
    async with open_session(task.run, [task]) as session:
        (source,) = session.sources
        dataset = task.dataset
        label = await weight_label(session.server)
        creation = None if (record := await _training(run, label)) is None else record.creation
        training = training_datasets(run, task.name) if run.config.by_evaluation() else [dataset]
        prompts = number_of_prompts(task.run.config.dataset, len(dataset))
        seen = None if training is None else await asyncio.to_thread(count_training_rows, dataset, prompts, *training)
        plan = make_plan(task, model=session.served.name, weights=label, creation=creation, training_rows=seen)
        with EvaluationFolder(folder, plan, resume=resume) as file:
            return await evaluate(file, task, source.generator.generate_and_score)


def folder_of(task: Task, options: EvaluateOptions, *, several: bool) -> Path:
    """Returns where the results of one evaluation go."""
    if options.out is not None:
        return options.out / _word(task.name) if several else options.out
    base, named = evaluations_folder(task.run), "" if task.name is None else f"-{task.name}"
    if not options.resume:
        return base / f"evaluate-{time.strftime('%Y-%m-%dT%H-%M-%S')}{named}"
    begun = sorted(path.parent for path in base.glob(f"evaluate-????-??-??T??-??-??{named}/{EVALUATION_FILE}"))
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
        logger.warning("this evaluation is not reported to the API: %s", error)
        return None
    if record.version is None or PolicyVersion.parse(label) > PolicyVersion.parse(record.version):
        logger.warning("run %s never had the weights %s; the evaluation is not reported to the API", run.run_id, label)
        return None
    return record


async def report_scores(run: RunSettings, found: Mapping[str | None, Evaluated]) -> None:
    """Reports to the API if the weights are a version of this training, because then a step exists to plot at.

    The API refuses the report if the run was created again meanwhile.
    """
    plans = {(evaluated.plan.weights, evaluated.plan.creation) for evaluated in found.values()}
    label, creation = plans.pop()
    if plans or label is None or creation is None:  # a training has changed the weights in between
        return
    try:
        async with connect_api(run, _API_PATIENCE) as api:
            step, values = PolicyVersion.parse(label).step, row(found)
            await api.report_metrics(run.run_id, SOURCE_BY_HAND, step, values, creation=creation)
    except (ApiError, ApiUnreachable) as error:
        logger.warning("this evaluation is not reported to the API: %s", error)


def _compare(first: Path, second: Path, out: Path | None, console: Console) -> None:
    comparison = compare(first, second)
    show_comparison(console, comparison)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        made = msgspec.to_builtins(dataclasses.asdict(comparison), enc_hook=str)
        write_file(out / COMPARISON_FILE, msgspec.json.format(msgspec.json.encode(made), indent=2))
