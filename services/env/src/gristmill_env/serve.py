"""`serve`: feeds a training run until it is finished.

    permit ──► row ──► prompt ──► completions ──► scores ──► group ──► submit
                                                    └──► a reason to drop the row

`serve` opens or joins the run, and `ServeLoop` is the loop. The loop takes permits for free places and starts one task
per permit. The task submits the row's group, or drops the row with a reason. The loop also starts the evaluations that
are due. The SDK's `PermitSession` renews the permits, and gives back a permit without a submitted group, so that no row
is lost or done twice. If the API, Redis or the model server is unavailable for minutes, the work only pauses.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import logging
import os
import re
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gristmill import (
    ApiError,
    Client,
    GroupError,
    Permit,
    PermitSession,
    PolicyVersion,
    RowResult,
    RunRecord,
    RunState,
    TrajectoryGroup,
    VersionSpan,
)
from gristmill.group import SOURCE
from gristmill.internal.calls import new_word
from gristmill.internal.logs import line
from gristmill.internal.prometheus import metrics_endpoint
from gristmill.internal.stall import StallGuard, StallLimits
from gristmill.internal.tracking import ObserverErrors
from gristmill.permits import Slots
from gristmill_env.errors import ROW_ERRORS, DropReason, reason_of
from gristmill_env.evaluation.plan import evaluation_tasks
from gristmill_env.evaluation.run import RunEvaluations, RunMeasure, version_left
from gristmill_env.preflight import first_warnings
from gristmill_env.progress import Pace, Tally
from gristmill_env.prometheus import EnvMetrics
from gristmill_env.rollouts.groups import (
    RolloutGroup,
    build_group,
    drop_reason,
    is_version,
    mean_total,
    trainable,
    version_spans,
)
from gristmill_env.run_settings import RunSettings
from gristmill_env.saved import Attempt, DroppedSaver, GroupSaver, set_other_groups_aside
from gristmill_env.session import (
    Session,
    Source,
    Task,
    connect_api,
    load_tasks,
    naming_source,
    open_session,
    sessions_folder,
)
from gristmill_env.tracking import Observers, WandbTracker, in_words

logger = logging.getLogger(__name__)

_STARTUP_PATIENCE = 300.0
_ROWS = "data.rows"
"""Source of the metrics row at step 0 that holds the number of rows."""
_MOST_ON_ONE_HOST = 4096
_HOW_TO_BEGIN = (
    "to begin another, give it a name: RUN_ID=<name> (GRISTMILL_RUN_ID outside Compose) or --run_id <name>, "
    "for the trainer too"
)
STALL = StallLimits(floor=120, frozen=900)
"""No work on the event loop takes seconds."""
_AGE_EVERY = 10.0
"""Seconds between two comparisons of the generating groups' versions with the run's."""
_PULSE = 1.0
"""Seconds between two reports of progress to the watchdog."""


async def serve(run: RunSettings, environ: Mapping[str, str]) -> None:
    """Feeds the run until it is finished; returns at once if it is finished already. Raises GristmillError."""
    config, run_id = run.config, run.run_id
    run.check_step_size()
    for warning in run.warnings():
        logger.warning("%s", warning)
    tasks = load_tasks(run)
    async with open_session(run, tasks, wait=_STARTUP_PATIENCE) as session, contextlib.AsyncExitStack() as evaluating:
        session.server.refuse_text_only()
        for source in session.sources:
            of = "" if source.task.name is None else f"source '{source.task.name}': "
            part = source.task.run.config
            limits = part.max_token_length, part.dataset.max_tokens
            for warning in first_warnings(source.generator.prompts, source.task.dataset, *limits):
                logger.warning("%s%s", of, warning)
        measures = []
        for task in evaluation_tasks(run) if config.steps_per_eval > 0 and config.by_evaluation() else ():
            training = [one.dataset for one in tasks if one.name == task.name] or [one.dataset for one in tasks]
            evaluating.push_async_exit(task)
            measures.append(RunMeasure(task, session.served.name, session.evaluator(task), training))
        recorded = config.recorded(session.served.name)
        worker = evaluating.enter_context(worker_name())
        async with connect_api(run, config.startup_patience or _STARTUP_PATIENCE, worker.word) as api:
            record = await api.create_run(run_id, recorded, config.group_size, run.deployment.stack)
        for measure in measures:
            measure.creation = record.creation
        open_observers = functools.partial(_observers, run, session, record, recorded, environ)
        async with connect_api(run, config.patience, worker.word) as api:
            if record.state == RunState.FINISHED:
                logger.info("run %s is already finished at version %s; %s", run_id, record.version, _HOW_TO_BEGIN)
                if measures:
                    await _evaluate_afterwards(run, session, record, measures, api, worker.name, open_observers)
                return
            logger.info("run %s is open at version %s", run_id, record.version or "none yet: waiting for a trainer")
            for measure in measures:
                logger.info("evaluation every %d steps on %s", config.steps_per_eval, measure.label)
            with contextlib.ExitStack() as observing:  # the observers close last, when the permits are given back
                # Registers at once, because a run without a live environment may be replaced by another run.
                creation = record.creation or None
                async with PermitSession(
                    api, run_id, worker.name, weight=config.inference_weight, creation=creation
                ) as permits:
                    registry = observing.enter_context(metrics_endpoint(config.metrics_address, environ))
                    metrics = None
                    if registry is not None:
                        metrics = functools.partial(EnvMetrics, registry, run_id, permits, session.server)
                    observers = observing.enter_context(contextlib.closing(open_observers(worker.name, metrics)))
                    await record_row_counts(api, run_id, row_counts(tasks), creation)
                    loop = ServeLoop(run, session, worker.name, api, permits, observers, measures)
                    try:
                        async with _watched():
                            await loop.run()
                    finally:
                        logger.info("run %s: %s", run_id, loop.tally)
    logger.info("run %s is finished", run_id)


class ServeLoop:
    """One process' part of a run. `run` is the loop, and the other methods follow the order of a row's stages."""

    def __init__(
        self, run: RunSettings, session: Session, worker_id: str, api: Client, permits: PermitSession,
        observers: Observers, measures: Sequence[RunMeasure],
    ) -> None:  # fmt: skip
        """`worker_id`: this process' name at the API; each process needs a different name. `measures`: the run's
        evaluations."""
        config = run.config
        self.tally = Tally()
        self._config = config
        self._run_id = run.run_id
        self._worker_id = worker_id
        self._api = api
        self._server = session.server
        self._session = session
        # The folder of another training of this run's id is not this training's.
        self._kept = sessions_folder(run) / (permits.creation or "any")
        self._observers = observers
        self._permits = permits
        permits.slots.places = config.workers
        self._evaluations: RunEvaluations | None = None
        if measures:
            by_name = {measure.name: measure for measure in measures}
            self._evaluations = RunEvaluations(
                config, run.run_id, worker_id, api, by_name, observers, permits.slots, permits.creation
            )
        self._trainer: _Trainer | None = None
        self._generating: dict[str, _Generation] = {}
        """By group id."""
        self._newest_row: int | None = None
        """The greatest row number of this process' permits."""
        self._all_rest = False
        self._pace = Pace(run.run_id)

    async def run(self) -> None:
        """Starts the rows of all permits and the evaluations that are due, until the run is finished.

        Then evaluates the last version. Raises an ExceptionGroup of the errors that waiting cannot resolve.
        """
        async with asyncio.TaskGroup() as tasks:
            ageing = tasks.create_task(self._give_up_stale())
            while (grant := await self._permits.take()) is not None:
                version = self._permits.version
                if version is None:  # the API issues no permits before a trainer has taken the run
                    continue
                if self._trainer is None or self._trainer.incarnation != version.incarnation:
                    self._trainer = await self._meet_trainer(version.incarnation)
                if self._evaluations is not None:
                    self._evaluations.begin_if_due(version, tasks)
                await self._note_rest(grant.permits)
                for permit in grant.permits:
                    tasks.create_task(self._row(permit, version))
            ageing.cancel()
            if self._evaluations is not None:
                await self._evaluations.at_end(self._permits.version)

    async def _note_rest(self, permits: Sequence[Permit]) -> None:
        """Logs once that the API has passed over a whole epoch, because every row rests."""
        curriculum = self._config.curriculum
        if curriculum is None:
            return
        for permit in permits:
            gap = permit.row - self._newest_row if self._newest_row is not None else 0
            # Another environment may have had the permits of the epoch.
            if gap > self._session.epoch and not self._all_rest and not await self._rows_within():
                self._all_rest = True
                logger.warning(
                    "run %s: all rows rest, so they come in their plain order as their rest ends; their rewards are "
                    "outside of the band [%g, %g] of `curriculum`",
                    self._run_id, *curriculum.band,
                )  # fmt: skip
            self._newest_row = max(permit.row, self._newest_row or 0)

    async def _rows_within(self) -> int:
        """Returns how many of the rows that were played are within the curriculum's band."""
        return (await self._api.status(self._run_id)).rows.get("within", 0)

    async def _meet_trainer(self, incarnation: int) -> _Trainer:
        """Reads whether the run's trainer publishes its weights. If so, only published weights may sample."""
        record = await self._api.get_run(self._run_id)
        publishes = (record.trainer or {}).get("publisher") != "none"
        self._server.trust_only(is_version if publishes else None)
        return _Trainer(incarnation, publishes, record.training_steps, record.groups_per_step, record.max_staleness)

    async def _give_up_stale(self) -> None:
        """Ends the generation of groups that the trainer would drop because their weights have become too old."""
        while True:
            await asyncio.sleep(_AGE_EVERY)
            trainer = self._trainer
            if not self._generating or trainer is None or trainer.max_staleness is None:
                continue
            record = await self._api.get_run(self._run_id)
            if record.version is None:
                continue
            oldest = PolicyVersion.parse(record.version).step - trainer.max_staleness
            for generation in self._generating.values():
                if generation.begun < oldest and not generation.bound.expired():
                    generation.stale = True
                    generation.bound.reschedule(0)

    async def _row(self, permit: Permit, version: PolicyVersion) -> None:
        """Finishes one row: submits its group, or drops the row with a reason. `version`: the newest at the grant."""
        kept = self._kept / permit.group_id
        async with self._permits.working(permit), removed_at_end(kept):
            await self._permits.slots.opened()
            limit = self._config.worker_timeout
            source, row = self._session.at(permit.row)
            dataset, generator = source.task.dataset, source.generator
            attempt = Attempt(dataset.index(row), source=source.task.name)
            generation = None
            try:
                async with asyncio.timeout(limit if limit > 0 else None) as bound:
                    attempt.item = item = dataset.item(row, permit.row)
                    with self._ageing(permit.group_id, bound) as generation:
                        group = await generator.generate(item, permit.group_id, step=version.step, kept=kept)
                    attempt.rollouts, attempt.sampling = group.rollouts, group.sampling
                    attempt.failed = group.failed
                    versions = self._versions(group, version)
                    self._permits.generated(permit)
                    with naming_source(source.task.name):
                        scored = await generator.score(group, permit.group_id, version.step)
            except TimeoutError:
                if not bound.expired():
                    raise
                if generation is not None and generation.stale:
                    why = f"it began at step {generation.begun}, which is too old now"
                    await self._drop(permit, DropReason.STALE, why, attempt)
                else:
                    await self._drop(permit, DropReason.TIMEOUT, f"it took more than {limit:g} s", attempt)
                return
            except ROW_ERRORS as error:
                attempt.rollouts, attempt.failed = error.rollouts, error.failed
                await self._drop(permit, reason_of(error), str(error), attempt)
                return
            attempt.scores, attempt.seconds = scored.scores, scored.seconds
            self._observers.scored(scored, version.step)
            config = self._config
            reason = drop_reason(
                scored, least=config.least_rollouts, ensure_scores_are_not_same=config.ensure_scores_are_not_same
            )
            # Solved and hopeless rows are exactly those whose scores are all the same.
            counts = reason in (None, DropReason.SAME_SCORES)
            result = await self._result(source, row, scored) if counts else None
            if reason is None:
                await self._submit(permit, source, scored, versions, version, attempt, result)
            else:
                errors = dict.fromkeys(score.error for score in scored.scores if score.error is not None)
                await self._drop(permit, reason, "; ".join(errors), attempt, result)

    @contextlib.contextmanager
    def _ageing(self, group_id: str, bound: asyncio.Timeout) -> Iterator[_Generation]:
        """Lets `_give_up_stale` end the block by `bound`."""
        begun = self._permits.version.step if self._permits.version is not None else 0
        self._generating[group_id] = generation = _Generation(begun, bound)
        try:
            yield generation
        finally:
            del self._generating[group_id]

    def _versions(self, group: RolloutGroup, granted: PolicyVersion) -> list[list[VersionSpan]]:
        """Returns which weights sampled each branch of each rollout.

        The model servers have discarded completions of other weights.
        """
        assert self._trainer is not None  # a permit exists, so the trainer has joined
        published = self._trainer.publishes
        branches = [branch for rollout in group.rollouts for branch in rollout.branches]
        return [version_spans(branch, str(granted), published=published) for branch in branches]

    async def _submit(
        self, permit: Permit, source: Source, scored: RolloutGroup, versions: list[list[VersionSpan]],
        version: PolicyVersion, attempt: Attempt, result: RowResult | None,
    ) -> None:  # fmt: skip
        try:
            group = build_group(
                scored, permit, self._run_id, self._worker_id, versions,
                include_messages=self._config.include_messages, correctness=source.task.scorer.correctness,
            )  # fmt: skip
            if not await self._permits.submit(group, result):
                return
        except (ApiError, GroupError) as error:
            if isinstance(error, ApiError) and error.code != "bad_group" and error.status != 413:
                raise
            logger.error("group %s is refused: %s", permit.group_id, error)
            await self._drop(permit, DropReason.REFUSED, str(error), attempt)
            return
        trained = [scored.rollouts[n] for n in trainable(scored)]
        self.tally.unscored += len(scored.rollouts) - len(trained)
        self.tally.failed_rollouts += len(scored.failed)
        self.tally.add(None, source=source.task.name)
        self._report(group)
        self._pace.group(int(group.mask.sum()), version.step, self._trainer.steps if self._trainer else None)
        await self._observers.submitted(group, [in_words(rollout) for rollout in trained], self.tally, scored)

    async def _result(self, source: Source, row: int, scored: RolloutGroup) -> RowResult | None:
        """Returns what decides whether the source's `row`-th row rests; None in a run without a curriculum."""
        curriculum = self._config.curriculum
        if curriculum is None:
            return None
        name, index = source.task.name, scored.item.index
        return RowResult(
            row=str(index) if name is None else f"{name}/{index}",
            reward=mean_total(scored),
            band=curriculum.band,
            groups=curriculum.window,
            # The first row of an epoch computes the order of another epoch: a second for ten million rows.
            turns=await asyncio.to_thread(self._session.turns, source, row, curriculum.rest),
        )

    async def _drop(
        self, permit: Permit, reason: DropReason, why: str, attempt: Attempt, result: RowResult | None = None
    ) -> None:
        """Saves what exists of the row's group, and gives the permit back. `why`: the row's error. `result`: of the
        group, if it was scored.

        Raises EnvError if every row fails.
        """
        await self._observers.dropping(permit, reason, why, attempt)
        if not await self._permits.drop(permit, reason.value, result):
            return
        self.tally.add(reason, why, attempt.source)
        count = self.tally.dropped[reason.value]
        fields: dict[str, object] = {"run": self._run_id, "group": permit.group_id, "row": permit.row}
        fields |= {"source": attempt.source} if attempt.source is not None else {}
        fields |= {"index": attempt.index, "reason": reason, "count": count, **({"why": why} if why else {})}
        # All lines of a run in which many rows fail would hide the others. The API's drops.jsonl has every row.
        rare = str(count).strip("0") == "1"
        logger.log(logging.INFO if rare else logging.DEBUG, "%s", line("drop", **fields))
        self._observers.dropped(reason, attempt.source)
        self.tally.check(self._trainer.groups_per_step if self._trainer is not None else None)

    def _report(self, group: TrajectoryGroup) -> None:
        fields: dict[str, object] = {
            "run": group.run_id,
            "group": group.group_id,
            "env": group.env_id,
            "row": group.row,
            **({SOURCE: group.meta[SOURCE]} if SOURCE in group.meta else {}),
        }
        fields |= {"version": group.oldest_version, "tokens": len(group.tokens)}
        logger.info(line("submit", **fields, reward_mean=float(group.rewards.mean())))


@dataclass(frozen=True)
class _Trainer:
    """The run's trainer, known from its first version on. The next trainer of the run has another incarnation."""

    incarnation: int
    publishes: bool
    """Whether it updates the model servers."""
    steps: int | None
    groups_per_step: int | None
    max_staleness: int | None


@dataclass
class _Generation:
    """A group in work at the model servers."""

    begun: int
    """The run's step when it began. No token of the group is of older weights."""
    bound: asyncio.Timeout
    stale: bool = False
    """Whether `bound` has ended it because its weights are too old."""


@contextlib.asynccontextmanager
async def removed_at_end(folder: Path) -> AsyncIterator[None]:
    """Removes the folder, which only agents elsewhere have, if the block ends without an error or a cancellation."""
    yield
    shutil.rmtree(folder, ignore_errors=True)


class Worker(NamedTuple):
    name: str
    """This process' name at the API."""
    word: str
    """Of its registrations, see `Client`."""


@contextlib.contextmanager
def worker_name() -> Iterator[Worker]:
    """Yields HOST-N with the least number N that no other environment of this user on this machine has.

    A killed process loses its number, so its successor takes the same name, and with it the permits of the process. The
    lock's file keeps the word of the registration, so the successor may take that over too.
    """
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:100]
    for number in range(1, _MOST_ON_ONE_HOST):
        path = Path(tempfile.gettempdir()) / f"gristmill-env-{os.getuid()}-{number}.lock"
        with contextlib.ExitStack() as stack:
            try:
                lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                stack.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):  # Another environment has the number, or another user the file.
                continue
            yield Worker(f"{host}-{number}", _kept_word(lock))
            return
    yield Worker(f"{host}-{os.getpid()}", new_word())


def _kept_word(file: int) -> str:
    """Returns the word in the open file. Writes a new one if the file has none."""
    word = new_word()
    kept = os.pread(file, 2 * len(word), 0).decode("ascii", "replace")
    if re.fullmatch(f"[0-9a-f]{{{len(word)}}}", kept):
        return kept
    os.ftruncate(file, 0)
    os.pwrite(file, word.encode(), 0)
    return word


def row_counts(tasks: Iterable[Task]) -> dict[str, tuple[str, int]]:
    """Returns the label and the number of rows of each source, by the name of the number in the metrics row."""
    return {
        "rows" if task.name is None else f"rows/{task.name}": (task.dataset.label, len(task.dataset)) for task in tasks
    }


async def record_row_counts(
    api: Client, run_id: str, counts: Mapping[str, tuple[str, int]], creation: str | None = None
) -> None:
    """Records the numbers of rows (`row_counts`) with the run; warns if a number was different before."""
    before = next((row.values for row in await api.metrics(run_id, _ROWS)), {})
    rows = {name: count for name, (_, count) in counts.items()}
    if before == rows:
        return
    for name, (label, count) in counts.items():
        if before.get(name, count) != count:
            logger.warning(
                "%s has %d rows; it had %d when run %s was last served. The order of the rows is computed from their "
                "number, so from here on some come again or are left out of their epoch; put the old data back, or "
                "give the run with the new ones another name",
                label,
                count,
                before[name],
                run_id,
            )
    await api.report_metrics(run_id, _ROWS, 0, rows, creation=creation)


async def _evaluate_afterwards(
    run: RunSettings, session: Session, record: RunRecord, measures: Sequence[RunMeasure], api: Client,
    worker_id: str, open_observers: Callable[[], Observers],
) -> None:  # fmt: skip
    """Evaluates the last version of a finished run, if a kill prevented its evaluations."""
    version = await version_left(api, record, session.server)
    if version is None:
        return
    with contextlib.closing(open_observers()) as observers:
        slots, creation = Slots(run.config.workers), record.creation or None
        # The session registers the environment: the API takes an evaluation only from a registered one.
        async with PermitSession(api, run.run_id, worker_id, creation=creation):
            by_name = {measure.name: measure for measure in measures}
            evaluations = RunEvaluations(run.config, run.run_id, worker_id, api, by_name, observers, slots, creation)
            await evaluations.at_end(version)


def _observers(
    run: RunSettings, session: Session, record: RunRecord, recorded: dict[str, Any], environ: Mapping[str, str],
    worker_id: str | None = None, metrics: Callable[[ObserverErrors], EnvMetrics] | None = None,
) -> Observers:  # fmt: skip
    """`worker_id`: None if the process only evaluates, and saves no groups. `metrics`: opens Prometheus' metrics."""
    config, model, creation = run.config, session.served.name, record.creation
    tracker = saver = dropped = None
    if config.use_wandb:
        folder = run.deployment.runs_dir
        correctness = {source.task.name: source.task.scorer.correctness for source in session.sources}
        tracker = functools.partial(
            WandbTracker, run.run_id, config, recorded, folder, environ, correctness=correctness
        )  # fmt: skip
    if worker_id is not None:
        dropped = DroppedSaver(run.run_folder, record, worker_id, model=model, config=config)
    if worker_id is not None and (groups := run.groups_file) is not None:

        def saver() -> GroupSaver:
            set_other_groups_aside(groups, creation)
            return GroupSaver(groups, run=run.run_id, model=model, config=config, creation=creation)

    return Observers(tracker, saver, metrics, dropped)


@contextlib.asynccontextmanager
async def _watched() -> AsyncIterator[None]:
    """Ends the process if the event loop is blocked for two minutes: exit code 70, and the stacks of all threads.

    The restart policy of the process then starts it again.
    """
    guard = StallGuard("environment", STALL)
    pulse = asyncio.create_task(_pulse(guard))
    try:
        yield
    finally:
        pulse.cancel()
        guard.close()


async def _pulse(guard: StallGuard) -> None:
    while True:
        guard.progress()
        await asyncio.sleep(_PULSE)
