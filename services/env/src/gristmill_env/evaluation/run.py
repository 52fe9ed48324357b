"""Evaluates the prompts of a plan, and decides when a run in training evaluates, and which environment.

Each stretch of steps_per_eval steps (0 to 99, 100 to 199, ...) has one evaluation, at the first version seen in it.
An evaluation is therefore due before the first step, and another at the end of the run. Of several environments, the
environment that gets the API's claim evaluates and renews the claim meanwhile. The others continue with rollouts. If
the claim expires, because its holder died or was stopped, another environment evaluates.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from gristmill import ApiError, ApiUnreachable, Client, GristmillError, PolicyVersion, RunRecord, SamplingParams
from gristmill.internal.logs import line
from gristmill.internal.saved import SavedGroup
from gristmill.permits import Slots
from gristmill_env.console import Steps
from gristmill_env.data import Item, PromptDataset
from gristmill_env.errors import (
    ROW_ERRORS,
    BusyEvaluationError,
    EvaluationError,
    InferenceError,
    RewardError,
    reason_of,
)
from gristmill_env.evaluation.folder import EXTRACTION, MAY_PASS, EvaluationFolder, judged, skipped
from gristmill_env.evaluation.plan import (
    count_training_rows,
    evaluations_folder,
    make_plan,
    number_of_prompts,
    seen_in_training,
)
from gristmill_env.evaluation.report import write_evaluation_page
from gristmill_env.evaluation.results import SOURCE, Evaluated, row, summarise, write_results
from gristmill_env.gather import gather
from gristmill_env.inference import ModelServers
from gristmill_env.inference.http import RefusedError, ServerTroubleError
from gristmill_env.rollouts.generator import RolloutGenerator
from gristmill_env.rollouts.groups import RolloutGroup
from gristmill_env.session import Task
from gristmill_env.settings.run import EnvConfig, EvalHandling
from gristmill_env.tracking import Observers

logger = logging.getLogger(__name__)

_TTL = 30.0
"""Seconds until a claim expires without renewal."""
_EVERY = 10.0
"""Seconds between renewals, and between checks whether another process' claim has expired."""
_LIMIT = 100
"""Prompts if eval_limit is not set; Atropos' evaluation takes the same number."""


def _is_of_the_training_too(error: Exception) -> bool:
    """Whether the training will meet an error of an evaluation as well. A refused request may be of the evaluation."""
    return isinstance(error, InferenceError | ApiError | ApiUnreachable) and not isinstance(error, RefusedError)


class Generate(Protocol):
    """Does what `RolloutGenerator.generate_and_score` does. The name appears in the logs."""

    def __call__(self, item: Item, name: str, *, sampling: SamplingParams, count: int) -> Awaitable[RolloutGroup]: ...


async def evaluate(
    file: EvaluationFolder, task: Task, generate: Generate, say: Callable[[str], None] | None = None
) -> Evaluated:
    """Evaluates the missing prompts of `file.plan`, and writes the results. Keeps finished prompts after any error.

    `generate`: scores by the task's rewards. `say`: as for `Steps`. Raises InferenceError when the model server does
    not answer or refuses every prompt, EvaluationError when no completion gets a score, and RewardError when the
    correctness reward fails to extract every answer.
    """
    started, resumed, plan, scorer = time.time(), len(file.done), file.plan, task.scorer
    missing = iter([number for number in range(plan.prompts) if number not in file.done])

    async def work() -> None:
        for number in missing:  # shared: each number goes to one worker
            try:
                item = task.dataset.item(number)
                group = await generate(item, f"e{number:06d}", sampling=plan.sampling, count=plan.samples)
            except ROW_ERRORS as error:
                record = skipped(number, reason_of(error), str(error), plan)
            else:
                record = await judged(group, scorer, plan)
            await file.add(record)
            progress.add(tokens=sum(completion.tokens or 0 for completion in record.completions))

    def conclude() -> Evaluated:
        groups = file.finish()
        _check_scored(groups, file.folder)
        _check_extraction(groups, f"{scorer.correctness.name}.{EXTRACTION}")
        summary = summarise(plan, groups)
        evaluated = Evaluated(plan, summary, file.folder, started=started, ended=time.time(), resumed=resumed)
        write_results(evaluated)
        write_evaluation_page(evaluated, groups)
        return evaluated

    with Steps("prompts evaluated", plan.prompts, done=resumed, say=say) as progress:
        await gather(work() for _ in range(task.run.config.max_eval_workers))
    # On a thread, because serve continues with rollouts meanwhile.
    return await asyncio.to_thread(conclude)


def _check_scored(groups: Sequence[SavedGroup], folder: Path) -> None:
    """Raises EvaluationError with the first error if prompts were asked, and no completion has a score."""
    completions = [completion for group in groups for completion in group.completions]
    if any(value is not None for one in completions for value in one.scores.values()):
        return
    failures = [f"{name}: {error}" for one in completions for name, error in one.errors.items()]
    skips = [f"{group.reason}: {group.error}" for group in groups if group.reason in MAY_PASS]
    if not completions and not skips:  # no prompt could be asked, which the figures count by reason
        return
    first = [*failures, *([] if completions else skips), "the rewards returned None"][0]
    what = f"{len(completions)} completions has a score" if completions else f"{len(groups)} prompts has a completion"
    text = f"none of {what}: {first} ({folder} has all completions and errors)"
    raise EvaluationError("nothing_scored", text, completions=len(completions), folder=folder)


def _check_extraction(groups: Sequence[SavedGroup], name: str) -> None:
    """Raises RewardError with the first error if the extraction failed on every completion that was judged."""
    judged = [completion for group in groups for completion in group.completions if completion.right is not None]
    errors = [completion.errors[name] for completion in judged if name in completion.errors]
    if errors and len(errors) == len(judged):
        text = f"{name} failed on all {len(judged)} completions, first: {errors[0]}"
        raise RewardError("extraction_failed", text, reward=name)


class RunMeasure:
    """Evaluates the model in training on one of the run's evaluation sets.

    An evaluation has its own rewards and environments, bound to the columns of the evaluation set. Its failures do not
    count among the failures of the training. The caller closes the task, which has threads and processes.
    """

    creation: str | None = None
    """`RunRecord.creation`, set when the run is open. An evaluation of another creation is never continued."""

    def __init__(
        self, task: Task, model: str, generator: RolloutGenerator, training: Sequence[PromptDataset] = ()
    ) -> None:
        """Warns if the rows are rows of `training`.

        `task`: one of `evaluation_tasks`. `model`: the model's served name. `generator`: makes the task's rollouts.
        """
        self._model = model
        self._task = task
        self._generator = generator
        self._folder = _writable(evaluations_folder(task.run))
        prompts = number_of_prompts(task.run.config.dataset, len(task.dataset), _LIMIT)
        self._seen = count_training_rows(task.dataset, prompts, *training) if training else None
        if self._seen:
            logger.warning("%s", seen_in_training(self._seen, prompts))

    @property
    def name(self) -> str | None:
        """Name of the evaluation; None for the evaluation of a run without `sources`."""
        return self._task.name

    @property
    def label(self) -> str:
        """The data set and split."""
        return self._task.dataset.label

    async def __call__(self, version: str) -> Evaluated:
        """Evaluates the weights of `version`. Keeps the prompts that a killed evaluation of `version` has finished.

        Raises InferenceError, BusyEvaluationError, and RewardError when a reward fails too often in this evaluation.
        """
        self._task.scorer.begin_window()
        generate = functools.partial(self._generator.generate_and_score, evaluation=True)
        plan = make_plan(
            self._task, model=self._model, weights=version, creation=self.creation, limit=_LIMIT,
            training_rows=self._seen,
        )  # fmt: skip
        with EvaluationFolder(self._folder / f"{version}-{plan.digest[:8]}", plan, resume=True) as file:
            return await evaluate(file, self._task, generate, logger.info)


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:  # the run folder may be mounted read-only
        instead = Path(tempfile.mkdtemp(prefix="gristmill-evaluations-"))
        logger.warning("evaluations cannot be kept in %s (%s); they are in %s", folder, error.strerror, instead)
        return instead


class RunEvaluations:
    """One environment's part in the evaluations of its run. The serve loop starts them."""

    def __init__(
        self,
        config: EnvConfig,
        run_id: str,
        worker_id: str,
        api: Client,
        evaluate: Mapping[str | None, Callable[[str], Awaitable[Evaluated]]],
        observers: Observers,
        slots: Slots,
        creation: str | None = None,
    ) -> None:
        """`worker_id`: this process' name at the API. `evaluate`: each evaluates the model servers' weights, given the
        newest version; by the name of the evaluation. `observers` receive the results, as the API does. `slots`: the
        places of rollouts, of which an evaluation closes some (`eval_handling`). `creation`: of the run, see
        `RunRecord`."""
        self._config = config
        self._creation = creation
        self._run_id = run_id
        self._worker_id = worker_id
        self._api = api
        self._evaluate = evaluate
        self._observers = observers
        self._slots = slots
        self._considered: int | None = None
        """The stretch of steps that was considered last."""
        self._measured = -1
        """Step of the version that this process evaluated last."""
        self._work: asyncio.Task[None] | None = None
        self._busy = False

    def begin_if_due(self, newest: PolicyVersion, tasks: asyncio.TaskGroup) -> asyncio.Task[None] | None:
        """Starts the evaluation that is due at the newest version as one of `tasks`, and closes places meanwhile.

        Returns None if none is due, or if the previous evaluation is not finished.
        """
        stretch = newest.step // self._config.steps_per_eval
        if stretch == self._considered or self._busy:
            return None
        self._considered = stretch
        self._stop_waiting()
        self._begin()  # here, not in the task: a row that begins before the task would not see it
        self._work = tasks.create_task(self._consider(newest, stretch * self._config.steps_per_eval))
        return self._work

    async def at_end(self, last: PolicyVersion | None) -> None:
        """Evaluates the last version of the finished run, unless that is done."""
        self._stop_waiting()
        if self._work is not None:
            await asyncio.wait([self._work])
        if last is not None:
            await self._consider(last, last.step)

    def _stop_waiting(self) -> None:
        """Stops waiting for an evaluation that another environment does."""
        if self._work is not None and not self._busy:
            self._work.cancel()

    def _begin(self) -> None:
        self._busy = True
        if self._config.eval_handling is EvalHandling.STOP_TRAIN:
            self._slots.places = 0
        elif self._config.eval_handling is EvalHandling.LIMIT_TRAIN:
            self._slots.places = max(1, int(self._config.workers * self._config.eval_limit_ratio))

    def _end(self) -> None:
        self._busy = False
        self._slots.places = self._config.workers

    async def _consider(self, version: PolicyVersion, due: int) -> None:
        """Evaluates at `version`, unless done; waits while another process does it. `due`: the step since it is due.

        An error of the evaluation is logged. Raises the errors that would end the training too: no model server
        answers, or the API refuses its calls. A cancelled call opens no places: another evaluation has closed them, or
        the process ends.
        """
        try:
            await self._evaluate_once(version, due)
        except BusyEvaluationError as error:
            logger.info("%s", error)  # a process of this machine, whose claim expired, is still evaluating
        except Exception as error:  # it may be of a reward or of a data set, and ends only the evaluation
            if _is_of_the_training_too(error):
                raise
            self._report_failure(version, error)
        self._end()

    def _report_failure(self, version: PolicyVersion, error: Exception, name: str | None = None) -> None:
        trace = None if isinstance(error, GristmillError | OSError) else error
        of = "" if name is None else f" {name}"
        logger.error(
            f"the evaluation{of} of version %s failed: %s; training continues without it",
            version,
            error,
            exc_info=trace,
        )

    async def _evaluate_once(self, version: PolicyVersion, due: int) -> None:
        while self._measured < due and not await self._api.metrics(self._run_id, SOURCE, after_step=due - 1):
            if await self._claim(due):
                self._begin()
                if await self._evaluate_under_claim(version, due):
                    return
            self._end()
            await asyncio.sleep(_EVERY)

    async def _claim(self, due: int) -> bool:
        holder = await self._api.claim(
            self._run_id, f"evaluation-{due}", self._worker_id, _TTL, creation=self._creation
        )
        return holder == self._worker_id

    async def _evaluate_under_claim(self, version: PolicyVersion, due: int) -> bool:
        """Evaluates, and renews the claim meanwhile. Returns False if it loses the claim and gives up."""
        work = asyncio.create_task(self._evaluate_and_report(version))
        try:
            while not (await asyncio.wait([work], timeout=_EVERY))[0]:
                if not await self._claim(due):
                    logger.warning("the evaluation of version %s went to another environment; it is given up", version)
                    return False
            await work
            return True
        finally:
            if not work.done():
                work.cancel()
                await asyncio.wait([work])

    async def _evaluate_and_report(self, version: PolicyVersion) -> None:
        logger.info(line("evaluate", run=self._run_id, version=version, handling=self._config.eval_handling))
        found = await self._evaluate_all(version)
        self._measured = version.step
        values = row(found)
        try:
            await self._api.report_metrics(self._run_id, SOURCE, version.step, values, creation=self._creation)
        except ApiError as error:
            if error.code not in ("bad_request", "too_large"):
                raise
            for evaluated in found.values():
                logger.warning("the API takes no figures of the evaluation in %s: %s", evaluated.folder, error)
            # The row is still needed, because it marks the evaluation as done.
            values = {"seconds": sum(evaluated.ended - evaluated.started for evaluated in found.values())}
            await self._api.report_metrics(self._run_id, SOURCE, version.step, values, creation=self._creation)
        self._observers.evaluation(
            {name: float(value) for name, value in values.items() if isinstance(value, int | float)}, version.step
        )
        for name, evaluated in found.items():
            own, named = row({None: evaluated}), {} if name is None else {"name": name}
            scores = {key: own[key] for key in ("pass@1", "total", "truncated", "seconds") if key in own}
            logger.info(
                line("evaluated", run=self._run_id, version=version, **named, **scores, folder=evaluated.folder)
            )

    async def _evaluate_all(self, version: PolicyVersion) -> dict[str | None, Evaluated]:
        """Returns the results by name. An error of one evaluation is logged; raises the last if none has a result, and
        the errors that the training will meet too."""
        evaluated: dict[str | None, Evaluated] = {}
        last: Exception | None = None
        for name, evaluate in self._evaluate.items():
            try:
                evaluated[name] = await evaluate(str(version))
            except Exception as error:  # it may be of a reward or of a data set
                if isinstance(error, BusyEvaluationError) or _is_of_the_training_too(error):
                    raise
                last = error
                if len(self._evaluate) > 1:
                    self._report_failure(version, error, name)
        if not evaluated and last is not None:
            raise last
        return evaluated


async def version_left(api: Client, record: RunRecord, server: ModelServers) -> PolicyVersion | None:
    """Returns the last version of the finished run, if its evaluation is missing and still possible.

    The trainer no longer publishes weights. If the model server has other weights by now, a warning names the remedy.
    """
    if record.version is None:
        return None
    version = PolicyVersion.parse(record.version)
    if await api.metrics(record.run_id, SOURCE, after_step=version.step - 1):
        return None
    if (record.trainer or {}).get("publisher") == "none" or (label := await weight_label(server)) == record.version:
        return version
    logger.warning(
        "the last evaluation of run %s is missing, and the model server %s, not %s; serve the final model and use "
        "`evaluate`",
        record.run_id,
        "does not report its weights" if label is None else f"has the weights '{label}'",
        version,
    )
    return None


async def weight_label(server: ModelServers) -> str | None:
    """Returns the label of the served weights; None if the server has no labels, because it is not vLLM."""
    try:
        return await server.weight_label()
    except (InferenceError, ServerTroubleError) as error:
        logger.debug("%s", error)
        return None
