"""The permits of one process, and the places that its rows take.

A permit is leave to generate the group of one row. It expires unless the process renews it, and the API then gives the
row to another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator

from gristmill import ApiError, Client, GristmillError, Permit, PermitGrant, TrajectoryGroup
from gristmill_env.errors import RunReplacedError

logger = logging.getLogger(__name__)

# Seconds. A permit expires 30 s after its last renewal, so two renewals may be lost.
_RENEW_EVERY = 8.0
_POLL = 20.0
_GOODBYE = 5.0
_REPORT_IDLE_AFTER = 60.0
_SETTLED = frozenset({"permit_lost", "conflict", "finished"})
"""Error codes of a submit that mean: another process has the row by now, or the row is no longer needed."""


class Slots:
    """Places for rows: `workers` at the model servers, and the same number again in later stages.

    A row leaves its place at the model servers when its completions are finished, so the servers never wait for scores
    or storage. An evaluation may close places while it runs.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._places = workers
        self._rows: set[str] = set()
        self._generating: set[str] = set()
        self._changed = asyncio.Event()

    @property
    def places(self) -> int:
        """How many rows may be at the model servers now."""
        return self._places

    @places.setter
    def places(self, places: int) -> None:
        self._places = places
        self._changed.set()

    async def free(self) -> int:
        """Waits until a place is free, and returns the number of free places."""
        while (free := min(self._places - len(self._generating), 2 * self._places - len(self._rows))) <= 0:
            await self._next_change()
        return free

    async def opened(self) -> None:
        """Waits until rows may begin."""
        while self._places == 0:
            await self._next_change()

    def begin(self, row: str) -> None:
        """Gives the row a place at the model servers. `row`: its group id."""
        self._rows.add(row)
        self._generating.add(row)

    def generated(self, row: str) -> None:
        """Frees the row's place at the model servers."""
        self._generating.discard(row)
        self._changed.set()

    def end(self, row: str) -> None:
        """Frees all places of the row."""
        self._rows.discard(row)
        self.generated(row)

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class Permits:
    """Takes permits for free places, renews them, and ends each by a submit or with a reason."""

    def __init__(self, api: Client, run_id: str, holder: str, slots: Slots) -> None:
        """`holder`: this process' name at the API; each process needs a different name."""
        self._api = api
        self._run_id = run_id
        self._holder = holder
        self._slots = slots
        self._creation: str | None = None
        self._held: dict[str, asyncio.Task[object] | None] = {}
        """The task that works on each permit, by group id; None before the task has begun."""
        self._settling: set[str] = set()
        self._idle_since = time.monotonic()

    async def take(self) -> PermitGrant:
        """Waits for free places, and takes permits for them; none if no permit came free in 20 seconds.

        Takes no spare permits, because another process could already work on them. Raises RunReplacedError.
        """
        grant = await self._api.permits(self._run_id, self._holder, await self._slots.free(), _POLL)
        self._refuse_another_run(grant.creation)
        # After an outage a permit can come a second time while its first work is still running.
        permits = [permit for permit in grant.permits if permit.group_id not in self._held]
        for permit in permits:
            self._held[permit.group_id] = None
            self._slots.begin(permit.group_id)
        self._report_idle(grant)
        return grant.model_copy(update={"permits": permits})

    @contextlib.contextmanager
    def working(self, permit: Permit) -> Iterator[None]:
        """Holds the permit while the current task works on it. Cancels the task if another process gets the permit."""
        self._held[permit.group_id] = asyncio.current_task()
        try:
            yield
        finally:
            del self._held[permit.group_id]
            self._settling.discard(permit.group_id)
            self._slots.end(permit.group_id)

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

    async def renew(self) -> None:
        """Renews the permits until it is cancelled."""
        while True:
            await asyncio.sleep(_RENEW_EVERY)
            if not self._held:
                continue
            for group_id in await self._api.renew_permits(self._run_id, self._holder, list(self._held)):
                # The API reports a permit as "lost" while this process submits or drops it.
                if (task := self._held.get(group_id)) is not None and group_id not in self._settling:
                    logger.warning("the permit of group %s went to another worker; its work is given up", group_id)
                    task.cancel()

    async def abandon(self) -> None:
        """Gives back all permits of this process' name. A restarted container has the name of the previous process."""
        await self._api.abandon_permits(self._run_id, self._holder)

    async def leave(self) -> None:
        """Gives back the unfinished permits. If the API is unreachable, the permits expire."""
        try:
            async with asyncio.timeout(_GOODBYE):
                await self.abandon()
        except (TimeoutError, GristmillError) as error:
            logger.warning("permits could not be given back (%s); they expire by themselves", error or "no answer")

    def _refuse_another_run(self, creation: str) -> None:
        """Raises RunReplacedError if another run has this run's id now, as after a long suspension of this process."""
        if self._creation not in (None, creation):
            raise RunReplacedError(
                "run_replaced",
                f"run {self._run_id} was deleted and created again since this process began; start the process again",
                run=self._run_id,
            )
        self._creation = creation

    def _report_idle(self, grant: PermitGrant) -> None:
        now = time.monotonic()
        if self._held:
            self._idle_since = now
        elif now - self._idle_since > _REPORT_IDLE_AFTER:
            self._idle_since = now
            what = "a trainer to take the run" if grant.version is None else "the trainer's next step"
            logger.info("run %s: nothing to do for a minute; waiting for %s", self._run_id, what)


def settled(error: ApiError) -> bool:
    """Returns whether the API's refusal means that this process no longer has the permit."""
    return error.code in _SETTLED
