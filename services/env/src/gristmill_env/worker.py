"""The serve loop: takes permits and submits groups.

Permit -> row -> prompt -> completions -> scores -> group -> submit. Up to `max_num_workers` permits are in the stages
up to the completions, and at most the same number in later stages, so model servers never wait for scores or storage.
A permit without a submitted group is given back, so that no row is lost or done twice.
If the API, Redis or the model server is unavailable for minutes, the work only pauses.
"""

from __future__ import annotations

import asyncio
import logging

from gristmill import (
    ApiError,
    Client,
    GristmillError,
    Permit,
    PolicyVersion,
    SamplingParams,
    TrajectoryGroup,
    VersionSpan,
)
from gristmill.logs import line
from gristmill_env.data import Item, PromptDataset
from gristmill_env.errors import ROW_ERRORS, DropReason, reason_of
from gristmill_env.evaluation.run import Evaluations
from gristmill_env.inference import ModelServers
from gristmill_env.permits import Permits, settled
from gristmill_env.progress import Pace, Tally
from gristmill_env.rollouts.generator import Played, Roller
from gristmill_env.rollouts.groups import build_group, drop_reason, is_version, trainable, version_spans
from gristmill_env.rollouts.transcript import Rollout
from gristmill_env.settings import EnvConfig
from gristmill_env.together import first_error
from gristmill_env.tracking import Observers, ScoredPrompt, in_words

logger = logging.getLogger(__name__)


class Worker:
    """One process' part of a run."""

    def __init__(
        self,
        config: EnvConfig,
        run_id: str,
        holder: str,
        *,
        api: Client,
        server: ModelServers,
        dataset: PromptDataset,
        roller: Roller,
        observers: Observers,
        evaluations: Evaluations,
    ) -> None:
        """`holder`: this process' name at the API; each process needs a different name."""
        self.tally = Tally()
        self.permits = Permits(api, run_id, holder, lambda: evaluations.room(config.workers), self._see)
        self._config = config
        self._run_id = run_id
        self._holder = holder
        self._api = api
        self._server = server
        self._published: bool | None = None
        self._steps: int | None = None
        self._pace = Pace(run_id)
        self._dataset = dataset
        self._roller = roller
        self._observers = observers
        self._evaluations = evaluations
        self._tasks = asyncio.TaskGroup()

    async def run(self) -> None:
        """Works until the run is finished. If cancelled, gives back its permits first.

        Raises the first GristmillError that waiting cannot resolve.
        """
        try:
            async with self._tasks as tasks:
                await self.permits.work(tasks, self._work)
                await self._evaluations.at_end(self.permits.version, self._roll_for_evaluation)
        except BaseExceptionGroup as group:
            known, _ = group.split(GristmillError)
            raise (first_error(known) if known is not None else group) from group
        finally:
            await self.permits.leave()

    async def _work(self, permit: Permit, version: str) -> None:
        """Finishes the permit's row: stores its group, or drops the row with a reason."""
        await self._evaluations.may_begin()
        limit = self._config.worker_timeout
        try:
            async with asyncio.timeout(limit if limit > 0 else None) as bound:
                item = self._dataset.item(permit.row)
                played, versions = await self._play(item, permit.group_id, version)
                self.permits.played(permit)
                rollout = await self._roller.score(played)
        except TimeoutError:
            if not bound.expired():
                raise
            await self._drop(permit, DropReason.TIMEOUT, f"it took more than {limit:g} s")
            return
        except ROW_ERRORS as error:
            await self._drop(permit, reason_of(error), str(error))
            return
        self._observers.scored(ScoredPrompt.of(rollout, PolicyVersion.parse(version)))
        reason = drop_reason(rollout, ensure_scores_are_not_same=self._config.ensure_scores_are_not_same)
        if reason is None:
            await self._submit(permit, rollout, versions, version)
        else:
            errors = dict.fromkeys(score.error for score in rollout.scores if score.error is not None)
            await self._drop(permit, reason, "; ".join(errors))

    def _see(self, version: str) -> asyncio.Task[None] | None:
        return self._evaluations.see(version, self._roll_for_evaluation, self._tasks)

    async def _roll_for_evaluation(self, item: Item, name: str, *, sampling: SamplingParams, count: int) -> Rollout:
        await self._is_published()
        return await self._roller.roll(item, name, sampling=sampling, count=count, evaluation=True)

    async def _play(self, item: Item, name: str, version: str) -> tuple[Played, list[list[VersionSpan]]]:
        """Returns attempts sampled with weights of this run. Other completions are discarded and requested again."""
        published = await self._is_published()
        played = await self._roller.play(item, name, step=PolicyVersion.parse(version).step)
        return played, [version_spans(attempt, version, published=published) for attempt in played.attempts]

    async def _is_published(self) -> bool:
        """Returns whether the run's trainer updates the model server. A permit exists, so the trainer has joined."""
        if self._published is None:
            record = await self._api.get_run(self._run_id)
            self._steps = record.training_steps
            self._published = (record.trainer or {}).get("publisher") != "none"
            if self._published:
                self._server.trust_only(is_version)
        return self._published

    async def _submit(self, permit: Permit, rollout: Rollout, versions: list[list[VersionSpan]], version: str) -> None:
        group = build_group(
            rollout, permit, self._run_id, self._holder, versions, include_messages=self._config.include_messages
        )
        try:
            await self.permits.submit(group)
        except ApiError as error:
            if error.code == "bad_group" or error.status == 413:
                logger.error("group %s is refused: %s", group.group_id, error)
                await self._drop(permit, DropReason.REFUSED)
            elif settled(error):
                logger.warning("group %s is not needed any more: %s", group.group_id, error)
            else:
                raise
            return
        kept = [rollout.attempts[n] for n in trainable(rollout)]
        self.tally.unscored += len(rollout.attempts) - len(kept)
        self.tally.add(None)
        self._tell(group)
        self._pace.group(int(group.mask.sum()), PolicyVersion.parse(version).step, self._steps)
        await self._observers.submitted(group, [in_words(attempt) for attempt in kept], self.tally, rollout)

    async def _drop(self, permit: Permit, reason: DropReason, why: str = "") -> None:
        told = {"why": why} if why else {}
        logger.info(line("drop", run=self._run_id, group=permit.group_id, row=permit.row, reason=reason, **told))
        if await self.permits.give_back(permit, reason.value):
            self.tally.add(reason)

    def _tell(self, group: TrajectoryGroup) -> None:
        fields: dict[str, object] = {
            "run": group.run_id,
            "group": group.group_id,
            "env": group.env_id,
            "row": group.row,
        }
        fields |= {"version": group.oldest_version, "tokens": len(group.tokens)}
        logger.info(line("submit", **fields, reward_mean=float(group.rewards.mean())))
