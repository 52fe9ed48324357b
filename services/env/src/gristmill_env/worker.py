"""The serve loop: permits in, groups out.

Permit -> row -> prompt -> completions -> scores -> group -> submit, `max_num_workers` of them at a time.
A permit that is not answered by a group is given back, so that nothing is lost and no row is done twice.
The API, Redis and the model server may go away for minutes: all that happens is that the work stands still.
"""

from __future__ import annotations

import asyncio
import logging
import time

from gristmill import ApiError, Client, GristmillError, Permit, PolicyVersion, RunState, TrajectoryGroup, VersionSpan
from gristmill.logs import line
from gristmill_env.data.dataset import Item, PromptDataset
from gristmill_env.drops import DropReason
from gristmill_env.errors import DatasetError, PromptError
from gristmill_env.groups import build_group, drop_reason
from gristmill_env.inference import ModelServer
from gristmill_env.rollout import PromptTooLongError, Roller, Rollout
from gristmill_env.settings import EnvConfig
from gristmill_env.tally import Tally
from gristmill_env.tracking import ScoredPrompt, Tracker
from gristmill_env.versions import UnpublishedWeightsError, is_version, version_spans

logger = logging.getLogger(__name__)

# Seconds. A permit lives for 30 without renewal; two renewals may be lost.
_RENEW_EVERY = 8.0
_POLL = 20.0
_GOODBYE = 5.0
_SETTLED = frozenset({"permit_lost", "conflict", "finished"})
"""Answers to a submit that mean: this row is another's, or nobody's, by now."""


class Worker:
    """One process' share of a run."""

    def __init__(
        self,
        config: EnvConfig,
        run_id: str,
        holder: str,
        *,
        api: Client,
        server: ModelServer,
        dataset: PromptDataset,
        roller: Roller,
        tracker: Tracker,
    ) -> None:
        """`holder`: this process' name towards the API; no other process may have it."""
        self.tally = Tally()
        self._config = config
        self._run_id = run_id
        self._holder = holder
        self._api = api
        self._server = server
        self._dataset = dataset
        self._roller = roller
        self._tracker = tracker
        self._items: dict[str, asyncio.Task[None]] = {}
        self._settling: set[str] = set()
        self._slot_free = asyncio.Event()
        self._asking_for_label = asyncio.Lock()
        self._published: bool | None = None

    async def run(self) -> None:
        """Work until the run is finished. Cancelled, it gives its permits back first.

        Raises the first GristmillError that no patience helps against.
        """
        # A predecessor of the same name (a container that was started again) may have left some.
        await self._api.abandon_permits(self._run_id, self._holder)
        try:
            async with asyncio.TaskGroup() as tasks:
                renewal = tasks.create_task(self._renew())
                await self._hand_out(tasks)
                for task in (renewal, *self._items.values()):
                    task.cancel()
        except BaseExceptionGroup as group:
            raise _first_known(group) or group from group
        finally:
            await self._leave()

    async def _hand_out(self, tasks: asyncio.TaskGroup) -> None:
        """Start work on every permit that comes, until the run is finished."""
        waiting_since = time.monotonic()
        while True:
            self._slot_free.clear()
            free = self._config.max_num_workers - len(self._items)
            if free == 0:
                await self._slot_free.wait()
                continue
            grant = await self._api.permits(self._run_id, self._holder, free, _POLL)
            if grant.state == RunState.FINISHED:
                return
            for permit in grant.permits:
                # After an outage a permit can come a second time while its first work still goes on.
                if permit.group_id not in self._items and grant.version is not None:
                    self._items[permit.group_id] = tasks.create_task(self._work(permit, grant.version))
            if grant.permits or self._items:
                waiting_since = time.monotonic()
            elif time.monotonic() - waiting_since > 60:
                waiting_since = time.monotonic()
                what = "a trainer to take the run" if grant.version is None else "the trainer's next step"
                logger.info("run %s: nothing to do for a minute; waiting for %s", self._run_id, what)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(_RENEW_EVERY)
            if not self._items:
                continue
            for group_id in await self._api.renew_permits(self._run_id, self._holder, list(self._items)):
                # One that is just being submitted or dropped is "lost" to ourselves.
                if (task := self._items.get(group_id)) is not None and group_id not in self._settling:
                    logger.warning("the permit of group %s went to another worker; its work is given up", group_id)
                    task.cancel()

    async def _work(self, permit: Permit, version: str) -> None:
        try:
            await self._attempt(permit, version)
        finally:
            del self._items[permit.group_id]
            self._settling.discard(permit.group_id)
            self._slot_free.set()

    async def _attempt(self, permit: Permit, version: str) -> None:
        """Bring the permit's row to its end: its group is stored, or dropped with a reason."""
        started = time.monotonic()
        try:
            item = self._dataset.item(permit.row)
            rollout, versions = await self._roll(item, permit.group_id, version)
        except PromptTooLongError as error:
            await self._drop(permit, DropReason.TOO_LONG, str(error))
            return
        except (DatasetError, PromptError) as error:
            await self._drop(permit, DropReason.BAD_ROW, str(error))
            return
        self._tracker.scored(
            ScoredPrompt(
                rollout.scores,
                [len(completion.token_ids) for completion in rollout.completions],
                [completion.finish_reason for completion in rollout.completions],
                time.monotonic() - started,
                PolicyVersion.parse(version).step,
            )
        )
        reason = drop_reason(rollout, ensure_scores_are_not_same=self._config.ensure_scores_are_not_same)
        if reason is None:
            group = build_group(rollout, permit, self._run_id, self._holder, versions)
            await self._submit(permit, group, [rollout.prompt.text + text for text in rollout.texts])
        else:
            errors = dict.fromkeys(score.error for score in rollout.scores if score.error is not None)
            await self._drop(permit, reason, "; ".join(errors))

    async def _roll(self, item: Item, name: str, version: str) -> tuple[Rollout, list[list[VersionSpan]]]:
        """A rollout by weights of this run; one by any others is thrown away and done again."""
        published = await self._is_published()
        while True:
            rollout = await self._roller.roll(item, name)
            try:
                return rollout, [version_spans(c, version, published=published) for c in rollout.completions]
            except UnpublishedWeightsError:
                await self._until_published()

    async def _is_published(self) -> bool:
        """Whether the run's trainer updates the model server. A permit exists, so the trainer's half is recorded."""
        if self._published is None:
            record = await self._api.get_run(self._run_id)
            self._published = (record.trainer or {}).get("publisher") != "none"
        return self._published

    async def _until_published(self) -> None:
        async with self._asking_for_label:  # one asks for all
            pause, told = 0.2, False
            while not is_version(await self._server.weight_label()):
                if not told:
                    logger.warning(
                        "the model server at %s has lost the weights in training (it was started again?); "
                        "waiting for the trainer to publish them",
                        self._server.url,
                    )
                    told = True
                await asyncio.sleep(pause)
                pause = min(pause * 2, 2.0)

    async def _submit(self, permit: Permit, group: TrajectoryGroup, texts: list[str]) -> None:
        self._settling.add(permit.group_id)
        try:
            await self._api.submit(group, self._holder)
        except ApiError as error:
            if error.code == "bad_group" or error.status == 413:
                logger.error("group %s is refused: %s", group.group_id, error)
                await self._drop(permit, DropReason.REFUSED)
            elif error.code in _SETTLED:
                logger.warning("group %s is not needed any more: %s", group.group_id, error)
            else:
                raise
            return
        self.tally.add(None)
        self._tracker.group(group, texts, self.tally)
        fields: dict[str, object] = {
            "run": group.run_id,
            "group": group.group_id,
            "env": group.env_id,
            "row": group.row,
        }
        fields |= {"version": group.oldest_version, "tokens": len(group.tokens)}
        logger.info(line("submit", **fields, reward_mean=float(group.rewards.mean())))

    async def _drop(self, permit: Permit, reason: DropReason, why: str = "") -> None:
        self._settling.add(permit.group_id)
        told = {"why": why} if why else {}
        logger.info(line("drop", run=self._run_id, group=permit.group_id, row=permit.row, reason=reason, **told))
        try:
            await self._api.return_permit(self._run_id, self._holder, permit.group_id, reason.value)
        except ApiError as error:
            if error.code not in _SETTLED:
                raise
            logger.warning("group %s is not needed any more: %s", permit.group_id, error)
            return
        self.tally.add(reason)

    async def _leave(self) -> None:
        """Give back what is not done. If the API is away just now, the permits run out by themselves."""
        try:
            async with asyncio.timeout(_GOODBYE):
                await self._api.abandon_permits(self._run_id, self._holder)
        except (TimeoutError, GristmillError) as error:
            logger.warning("permits could not be given back (%s); they expire by themselves", error or "no answer")


def _first_known(group: BaseExceptionGroup[BaseException]) -> GristmillError | None:
    for error in group.exceptions:
        found = _first_known(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(found, GristmillError):
            return found
    return None
