"""Acquires permits as slots become free, keeps the permits alive, and gives all of them back at the end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from gristmill import ApiError, Client, GristmillError, Permit, RunState, TrajectoryGroup
from gristmill_env.errors import RunReplacedError

logger = logging.getLogger(__name__)

# Seconds. A permit expires 30 s after its last renewal, so two renewals may be lost.
_RENEW_EVERY = 8.0
_POLL = 20.0
_GOODBYE = 5.0
_SETTLED = frozenset({"permit_lost", "conflict", "finished"})
"""Error codes of a submit that mean: another process has the row by now, or the row is no longer needed."""

Pause = asyncio.Task[None]
Work = Callable[[Permit, str], Awaitable[None]]
"""The work under a permit, given the newest policy version; it ends with `submit` or `give_back`.

The work calls `played` when it no longer needs the model servers, so that they stay busy while it scores and submits.
"""


class Permits:
    """One process' permits of a run."""

    def __init__(
        self, api: Client, run_id: str, holder: str, room: Callable[[], int], see: Callable[[str], Pause | None]
    ) -> None:
        """`holder`: this process' name at the API; each process needs a different name. `room`: returns how many
        permits may be at the model servers now; the same number again may be in later stages. `see`: receives the
        newest policy version with every grant. If `see` returns a pause, there may be more room when the pause ends.
        """
        self.version: str | None = None
        """The newest policy version that the API has reported."""
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
        """Starts `work` on every permit until the run is finished, then cancels the unfinished work."""
        # A previous process with the same name (a restarted container) may have left permits.
        await self._api.abandon_permits(self._run_id, self._holder)
        renewal = tasks.create_task(self._renew())
        await self._hand_out(tasks, work)
        for task in (renewal, *self._items.values()):
            task.cancel()

    def played(self, permit: Permit) -> None:
        """Marks the permit as done with the model servers, so that the next permit may be requested."""
        self._playing.discard(permit.group_id)
        self._changed.set()

    async def submit(self, group: TrajectoryGroup) -> None:
        """Submits the group for its permit. Raises ApiError when the API refuses the group."""
        self._settling.add(group.group_id)
        await self._api.submit(group, self._holder)

    async def give_back(self, permit: Permit, reason: str) -> bool:
        """Gives the permit up for `reason`; its row is spent. Returns False if this process no longer had it."""
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
        """Gives back the unfinished permits. If the API is unreachable, the permits expire."""
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
                # After an outage a permit can come a second time while its first work is still running.
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
        """Raises RunReplacedError if another run has this run's id now, as after a long suspension of this process."""
        if self._creation not in (None, creation):
            raise RunReplacedError(
                "run_replaced",
                f"run {self._run_id} was deleted and created again since this process began; start the process again",
                run=self._run_id,
            )
        self._creation = creation

    def _free(self) -> int:
        """Returns how many permits to request: no spare ones, because another process could already work on them."""
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
                # The API reports a permit as "lost" while this process submits or drops it.
                if (task := self._items.get(group_id)) is not None and group_id not in self._settling:
                    logger.warning("the permit of group %s went to another worker; its work is given up", group_id)
                    task.cancel()


def settled(error: ApiError) -> bool:
    """Returns whether the API's refusal means that this process no longer has the permit."""
    return error.code in _SETTLED
