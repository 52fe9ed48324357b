"""An environment's session with a run: it acquires permits, keeps them alive, and gives all of them back at the end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from types import TracebackType

from gristmill.client import Client
from gristmill.errors import ApiError, ErrorCode, GristmillError, RunReplacedError
from gristmill.group import TrajectoryGroup
from gristmill.run import Permit, RunState

_LOG = logging.getLogger(__name__)
HEARTBEAT = 8.0
"""Seconds between renewals. The API's permits last API_PERMIT_TTL_S seconds (30), so two renewals may be lost."""
_POLL = 20.0
_GOODBYE = 5.0
_SETTLED = frozenset({ErrorCode.PERMIT_LOST, ErrorCode.CONFLICT, ErrorCode.FINISHED})
"""Error codes with which the API answers if another process has the row by now, or the row is no longer needed."""

Work = Callable[[Permit, str], Awaitable[None]]
"""The work under a permit, given the newest policy version ("1.20"). It ends with `submit` or `drop`."""


class PermitSession:
    """One environment's permits of a run, as a context manager. A task renews the permits while the work runs.

    The environment is registered during the session, so the run counts as in use: no other run can suspend it.
    """

    def __init__(
        self,
        api: Client,
        run_id: str,
        holder: str,
        *,
        weight: float | None = None,
        min_batch_allocation: float | None = None,
        heartbeat: float = HEARTBEAT,
    ) -> None:
        """`holder`: the name of this process; each process needs a different name. `weight` and `min_batch_allocation`:
        see `Client.register_env`. `heartbeat`: seconds between renewals.
        """
        self.version: str | None = None
        """The newest policy version that the API has reported."""
        self._api = api
        self._run_id = run_id
        self._holder = holder
        self._shares = (weight, min_batch_allocation)
        self._heartbeat = heartbeat
        self._creation: str | None = None
        self._items: dict[str, asyncio.Task[None]] = {}
        self._generating: set[str] = set()
        self._settling: set[str] = set()
        self._changed = asyncio.Event()

    async def __aenter__(self) -> PermitSession:
        """Registers the environment. Gives back the permits that an earlier process with the same name left."""
        await self._api.abandon_permits(self._run_id, self._holder)
        await self._api.register_env(self._run_id, self._holder, *self._shares)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Gives back the permits and the registration. If the API is unreachable, they expire."""
        try:
            async with asyncio.timeout(_GOODBYE):
                await self._api.abandon_permits(self._run_id, self._holder)
                await self._api.leave_env(self._run_id, self._holder)
        except (TimeoutError, GristmillError) as failure:
            _LOG.warning("permits could not be given back (%s); they expire by themselves", failure or "no answer")

    async def run(self, work: Work, at_once: int | Callable[[], int] = 8) -> None:
        """Runs `work` on every permit until the run is finished, then cancels the unfinished work.

        `at_once`: how many permits may generate at one time, or a function that returns the number. The same number
        again may be in later stages; see `generated`. Call `wake` if the function's number grows.

        Cancels work whose permit was lost. Raises the first GristmillError of the work or of the session, such as
        RunReplacedError. Raises an ExceptionGroup if the work raised only other errors.
        """
        room = at_once if callable(at_once) else lambda: at_once
        try:
            async with asyncio.TaskGroup() as tasks:
                renewal = tasks.create_task(self._keep_alive())
                await self._hand_out(tasks, work, room)
                for task in (renewal, *self._items.values()):
                    task.cancel()
        except ExceptionGroup as group:
            if (known := _first(group)) is None:
                raise
            raise known from group

    async def submit(self, group: TrajectoryGroup) -> bool:
        """Submits the group for its permit. Returns False if the group is not needed any more.

        Raises ApiError for any other refusal, such as `bad_group`.
        """
        self._settling.add(group.group_id)
        try:
            await self._api.submit(group, self._holder)
        except ApiError as error:
            return self._not_needed(group.group_id, error)
        return True

    async def drop(self, permit: Permit, reason: str) -> bool:
        """Gives the permit up; its row is spent. Returns False if this process no longer had the permit.

        `reason`: 1 to 64 lower-case letters, digits and underscores. The run's status counts the reasons.
        """
        self._settling.add(permit.group_id)
        try:
            await self._api.return_permit(self._run_id, self._holder, permit.group_id, reason)
        except ApiError as error:
            return self._not_needed(permit.group_id, error)
        return True

    def generated(self, permit: Permit) -> None:
        """Marks the permit's completions as generated, so that the next permit is requested while this one is scored.

        Without this call, the next permit is requested when the work ends.
        """
        self._generating.discard(permit.group_id)
        self._changed.set()

    def wake(self) -> None:
        """Checks again how many permits may be requested."""
        self._changed.set()

    def _not_needed(self, group_id: str, error: ApiError) -> bool:
        if error.code not in _SETTLED:
            raise error
        _LOG.warning("group %s is not needed any more: %s", group_id, error)
        return False

    async def _hand_out(self, tasks: asyncio.TaskGroup, work: Work, room: Callable[[], int]) -> None:
        waiting_since = time.monotonic()
        while True:
            self._changed.clear()
            # No spare permits, because another process could already work on them.
            most = room()
            free = min(most - len(self._generating), 2 * most - len(self._items))
            if free <= 0:
                await self._changed.wait()
                continue
            grant = await self._api.permits(self._run_id, self._holder, free, _POLL)
            self._refuse_another_run(grant.creation)
            self.version = grant.version
            if grant.state is RunState.FINISHED:
                return
            for permit in grant.permits:
                # After an outage a permit can come a second time while its first work is still running.
                if permit.group_id not in self._items and grant.version is not None:
                    self._generating.add(permit.group_id)
                    self._items[permit.group_id] = tasks.create_task(self._do(work, permit, grant.version))
            if grant.permits or self._items:
                waiting_since = time.monotonic()
            elif time.monotonic() - waiting_since > 60:
                waiting_since = time.monotonic()
                cause = "a trainer to take the run" if grant.version is None else "the trainer's next step"
                _LOG.info("run %s: nothing to do for a minute; waiting for %s", self._run_id, cause)

    def _refuse_another_run(self, creation: str) -> None:
        """Raises RunReplacedError if another run has this run's id now, as after a long suspension of this process."""
        if self._creation not in (None, creation):
            raise RunReplacedError(
                "run_replaced",
                f"run {self._run_id} was deleted and created again since this process began; start the process again",
                run=self._run_id,
            )
        self._creation = creation

    async def _do(self, work: Work, permit: Permit, version: str) -> None:
        group_id = permit.group_id
        try:
            await work(permit, version)
            if group_id not in self._settling:
                _LOG.warning("the work on group %s ended without submit or drop; the group is dropped", group_id)
                await self.drop(permit, "not_submitted")
        finally:
            del self._items[group_id]
            self._generating.discard(group_id)
            self._settling.discard(group_id)
            self._changed.set()

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat)
            await self._beat()
            if not self._items:
                continue
            for group_id in await self._api.renew_permits(self._run_id, self._holder, list(self._items)):
                # The API reports a permit as "lost" while this process submits or drops it.
                if (task := self._items.get(group_id)) is not None and group_id not in self._settling:
                    _LOG.warning("the permit of group %s went to another worker; its work is given up", group_id)
                    task.cancel()

    async def _beat(self) -> None:
        """Reports that the environment is alive. A process whose work fills all slots requests no permits."""
        try:
            try:
                await self._api.heartbeat_env(self._run_id, self._holder)
            except ApiError as error:
                if error.code != ErrorCode.ENV_MISSING:
                    raise
                await self._api.register_env(self._run_id, self._holder, *self._shares)
        except GristmillError as error:  # The calls for permits decide whether the process can continue.
            _LOG.warning("the heartbeat of %s failed: %s", self._holder, error)


def _first(group: ExceptionGroup[Exception]) -> GristmillError | None:
    """Returns the first GristmillError in the group."""
    for error in group.exceptions:
        found = _first(error) if isinstance(error, ExceptionGroup) else error
        if isinstance(found, GristmillError):
            return found
    return None
