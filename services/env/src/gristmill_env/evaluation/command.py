"""`evaluate`: measures a model on a fixed set of prompts. Needs a model server; reports to the API if one answers."""

from __future__ import annotations

import dataclasses
import logging
import time
from pathlib import Path

import msgspec
from rich.console import Console

from gristmill import ApiError, ApiUnreachable, Client, PolicyVersion
from gristmill_env.durable import write_file
from gristmill_env.errors import EvaluationError, InferenceError
from gristmill_env.evaluation.compare import Comparison, compare
from gristmill_env.evaluation.evaluate import evaluate
from gristmill_env.evaluation.options import EvaluateOptions
from gristmill_env.evaluation.plan import evaluation_task, evaluations_folder, make_plan
from gristmill_env.evaluation.progress import EvaluationProgress
from gristmill_env.evaluation.report import show, show_comparison
from gristmill_env.evaluation.results import RESULTS_FILE, Evaluated
from gristmill_env.evaluation.samples import PLAN_FILE, SampleFile
from gristmill_env.evaluation.telling import SOURCE_BY_HAND, row
from gristmill_env.inference import ModelServers, Thinking
from gristmill_env.inference.http import ServerTroubleError
from gristmill_env.launch import Launch
from gristmill_env.prepare import AT_A_TERMINAL, meet_model
from gristmill_env.versions import is_version

logger = logging.getLogger(__name__)

COMPARISON_FILE = "comparison.json"
_API_PATIENCE = 5.0


async def run_evaluate(launch: Launch, options: EvaluateOptions, console: Console) -> None:
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
    evaluated = await _evaluate(launch, options, console)
    show(console, evaluated)
    await _tell(launch, evaluated)
    for folder in options.compare:
        _compare(folder, evaluated.folder, evaluated.folder, console)


async def _evaluate(launch: Launch, options: EvaluateOptions, console: Console) -> Evaluated:
    config, folder = launch.config, _folder(launch, options)
    task = evaluation_task(launch)
    servers = ModelServers(config.server_configs, patience=config.patience, thinking=Thinking.of(config))
    async with task, servers as server:
        served, roller = await meet_model(launch, task, server, config.startup_patience or AT_A_TERMINAL)
        plan = make_plan(launch, task, model=served.name, weights=await _weights(server))
        errors = Console(stderr=True)
        with SampleFile(folder, plan, resume=options.resume) as file:
            progress = EvaluationProgress(plan.prompts, len(file.done), console=errors, say=errors.out)
            return await evaluate(
                file,
                task.dataset,
                roller.roll,
                decision=task.scorer.decision,
                workers=config.max_eval_workers,
                progress=progress,
            )


def _folder(launch: Launch, options: EvaluateOptions) -> Path:
    if options.out is not None:
        return options.out
    base = evaluations_folder(launch)
    if not options.resume:
        return base / f"evaluate-{time.strftime('%Y-%m-%dT%H-%M-%S')}"
    begun = sorted(path.parent for path in base.glob(f"evaluate-*/{PLAN_FILE}"))
    unfinished = [folder for folder in begun if not (folder / RESULTS_FILE).exists()]
    if not unfinished:
        raise EvaluationError(
            "nothing_to_resume",
            f"no unfinished evaluation in {base}: leave --resume out, or name its folder by --out",
            folder=base,
        )
    return unfinished[-1]


async def _weights(server: ModelServers) -> str | None:
    try:
        return await server.weight_label()
    except (InferenceError, ServerTroubleError) as error:
        logger.debug("%s", error)  # fine: a server that is not vLLM has no labels
        return None


async def _tell(launch: Launch, evaluated: Evaluated) -> None:
    """Reports to the API if the weights are a version of this run there, because then a step exists to plot at."""
    label = evaluated.plan.weights
    if label is None or not is_version(label):
        return
    version, config = PolicyVersion.parse(label), launch.config
    try:
        token = launch.deployment.api_token
        async with Client(config.rollout_server_url, patience=_API_PATIENCE, token=token) as api:
            newest = (await api.get_run(launch.run_id)).version
            if newest is None or version > PolicyVersion.parse(newest):
                logger.warning("run %s never had the weights %s; the API is not told", launch.run_id, label)
                return
            await api.report_metrics(launch.run_id, SOURCE_BY_HAND, version.step, row(evaluated))
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
