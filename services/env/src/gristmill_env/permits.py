"""Permits at work: taken as slots come free, kept alive, and all given back at the end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from gristmill import ApiError, Client, GristmillError, Permit, RunState, TrajectoryGroup
from gristmill_env.errors import RunReplacedError

logger = logging.getLogger(__name__)

# Seconds. A permit lives for 30 without renewal; two renewals may be lost.
_RENEW_EVERY = 8.0
_POLL = 20.0
_GOODBYE = 5.0
_SETTLED = frozenset({"permit_lost", "conflict", "finished"})
"""Answers to a submit that mean: this row is another's, or nobody's, by now."""

Pause = asyncio.Task[None]
Work = Callable[[Permit, str], Awaitable[None]]
"""What is done under a permit, given the newest policy version; it ends by `submit` or `give_back`. It calls `played`
as soon as it needs the model servers no more, so that they are not left idle while it scores and submits."""


class Permits:
    """One process' permits of a run."""

    def __init__(
        self, api: Client, run_id: str, holder: str, room: Callable[[], int], see: Callable[[str], Pause | None]
    ) -> None:
        """`holder`: this process' name towards the API; no other process may have it. `room`: permits whose work may be
        at the model servers now; as many again may be past them. `see`: is told the newest policy version with every
        grant; where that means a pause, there may be more room when it ends.
        """
        self.version: str | None = None
        """The newest policy version that the API told of."""
        self._api = api
        self._run_id = run_id
        self._holder = holder
        self._room = room
        self._see = see
        self._creation: str | None = None
        self._items: dict[str, asyncio.Task[None]] = {}
        self._playing: set[str] = set()
        self._settling: set[str] = set()
        self._changed = asyncio.Event()

    async def work(self, tasks: asyncio.TaskGroup, work: Work) -> None:
        """Start `work` on every permit that comes, until the run is finished; what is still in hand is cancelled."""
        # A predecessor of the same name (a container that was started again) may have left some.
        await self._api.abandon_permits(self._run_id, self._holder)
        renewal = tasks.create_task(self._renew())
        await self._hand_out(tasks, work)
        for task in (renewal, *self._items.values()):
            task.cancel()

    def played(self, permit: Permit) -> None:
        """The permit's work needs the model servers no more: the next permit may be asked for."""
        self._playing.discard(permit.group_id)
        self._changed.set()

    async def submit(self, group: TrajectoryGroup) -> None:
        """Answer the group's permit with the group. Raises ApiError when the API refuses it."""
        self._settling.add(group.group_id)
        await self._api.submit(group, self._holder)

    async def give_back(self, permit: Permit, reason: str) -> bool:
        """Give the permit up for `reason`; its row is spent. False when it was another's, or nobody's, by now."""
        self._settling.add(permit.group_id)
        try:
            await self._api.return_permit(self._run_id, self._holder, permit.group_id, reason)
        except ApiError as error:
            if not settled(error):
                raise
            logger.warning("group %s is not needed any more: %s", permit.group_id, error)
            return False
        return True

    async def leave(self) -> None:
        """Give back what is not done. If the API is away just now, the permits run out by themselves."""
        try:
            async with asyncio.timeout(_GOODBYE):
                await self._api.abandon_permits(self._run_id, self._holder)
        except (TimeoutError, GristmillError) as error:
            logger.warning("permits could not be given back (%s); they expire by themselves", error or "no answer")

    async def _hand_out(self, tasks: asyncio.TaskGroup, work: Work) -> None:
        waiting_since = time.monotonic()
        while True:
            self._changed.clear()
            if (free := self._free()) <= 0:
                await self._changed.wait()
                continue
            grant = await self._api.permits(self._run_id, self._holder, free, _POLL)
            self._refuse_another_run(grant.creation)
            self.version = grant.version
            if grant.state == RunState.FINISHED:
                return
            if grant.version is not None and (pause := self._see(grant.version)) is not None:
                pause.add_done_callback(lambda _: self._changed.set())
            for permit in grant.permits:
                # After an outage a permit can come a second time while its first work still goes on.
                if permit.group_id not in self._items and grant.version is not None:
                    self._playing.add(permit.group_id)
                    self._items[permit.group_id] = tasks.create_task(self._do(work, permit, grant.version))
            if grant.permits or self._items:
                waiting_since = time.monotonic()
            elif time.monotonic() - waiting_since > 60:
                waiting_since = time.monotonic()
                what = "a trainer to take the run" if grant.version is None else "the trainer's next step"
                logger.info("run %s: nothing to do for a minute; waiting for %s", self._run_id, what)

    def _refuse_another_run(self, creation: str) -> None:
        """A process that stood still must not answer permits of a run that has replaced its own under the same id."""
        if self._creation not in (None, creation):
            raise RunReplacedError(
                "run_replaced",
                f"run {self._run_id} was deleted and created again since this process began; start the process again",
                run=self._run_id,
            )
        self._creation = creation

    def _free(self) -> int:
        """Permits that may be asked for. Never one ahead of need: another process could have it at work already."""
        room = self._room()
        return min(room - len(self._playing), 2 * room - len(self._items))

    async def _do(self, work: Work, permit: Permit, version: str) -> None:
        try:
            await work(permit, version)
        finally:
            del self._items[permit.group_id]
            self._playing.discard(permit.group_id)
            self._settling.discard(permit.group_id)
            self._changed.set()

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


def settled(error: ApiError) -> bool:
    """Whether the API's refusal means that the permit is another's, or nobody's, by now."""
    return error.code in _SETTLED
