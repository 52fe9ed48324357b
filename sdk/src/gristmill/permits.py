"""An environment's session with a run: it acquires permits, keeps them alive, and gives all of them back at the end.

`PermitSession.run` is the whole loop of a simple environment. An environment that writes its own loop calls `take` for
the next permits, and works on each permit in `working`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import TracebackType
from typing import Literal

from gristmill.client import Client
from gristmill.errors import ApiError, ApiUnreachable, ErrorCode, GristmillError, RunReplacedError
from gristmill.group import TrajectoryGroup
from gristmill.policy_version import PolicyVersion
from gristmill.run import Permit, PermitGrant, RowResult, RunState

_LOG = logging.getLogger(__name__)
HEARTBEAT = 8.0
"""Seconds between renewals. The API's permits last API_PERMIT_TTL_S seconds (30), so two renewals may be lost."""
_BEAT = 3.0
"""Seconds between reports that the process is alive: a person sees within ten seconds that it was killed."""
_ROUNDING = 0.1
"""Seconds between the clocks of this process and of Redis, which count the same time."""
_POLL = 20.0
_MOST_PERMITS = 1024
"""The API grants at most as many at once."""
_GOODBYE = 5.0
_REPORT_IDLE_AFTER = 60.0
_SETTLED = frozenset({ErrorCode.PERMIT_LOST, ErrorCode.CONFLICT, ErrorCode.FINISHED})
"""Error codes with which the API answers if another process has the row by now, or the row is no longer needed."""

_OF_ONE_GROUP = frozenset({ErrorCode.BAD_GROUP, ErrorCode.TOO_LARGE})
"""Error codes with which the API refuses one group. The next group may be accepted."""
WORK_FAILED = "work_failed"
"""The reason of a group whose work raised an exception."""
_DROPPED_IN_A_ROW = 32
"""Dropped permits without a submitted group after which a warning is logged; again when the number has doubled."""

Work = Callable[[Permit, PolicyVersion], Awaitable[None]]
"""The work under a permit, given the newest policy version. It ends with `submit` or `drop`."""


class PermitSession:
    """One environment's permits of a run, as a context manager. Tasks renew them and the environment's registration.

    The environment is registered during the session, so the run counts as in use: no other run can suspend it.

    If a renewal fails, the session cancels the body of the `async with` statement and raises the error of the renewal.
    """

    def __init__(
        self,
        api: Client,
        run_id: str,
        holder: str,
        *,
        weight: float | None = None,
        heartbeat: float = HEARTBEAT,
        creation: str | None = None,
        on_error: Literal["raise", "drop"] = "raise",
    ) -> None:
        """`holder`: the name of this process; each process needs a different name. `weight`: see
        `Client.register_env`. `heartbeat`: seconds between renewals. `creation`: `RunRecord.creation` of the run;
        None: of the run that grants the first permits.

        `on_error`: an exception of the work on a permit. "raise": it ends the session. "drop": the permit is dropped
        with the reason "work_failed", and the first exception of each kind at each line of code is logged with its
        traceback. An exception still ends the session if it concerns every permit: the API is unreachable, the run was
        replaced, or the API refused something other than this group.
        """
        self.slots = Slots(8)
        """The places for permits. `take` requests permits for the free places."""
        self.version: PolicyVersion | None = None
        """The newest policy version that the API has reported."""
        self.creation = creation
        """`RunRecord.creation` of the run, which each call names; None if no permit was granted yet."""
        self._api = api
        self._run_id = run_id
        self._holder = holder
        self._weight = weight
        self._heartbeat = heartbeat
        self._beat_every = min(heartbeat, _BEAT)
        self._held: dict[str, asyncio.Task[object] | None] = {}
        """The task that works on each permit, by group id; None before the task has begun."""
        self._settling: set[str] = set()
        self._on_error = on_error
        self._logged: set[tuple[type[BaseException], str, int]] = set()
        """Type, file and line of the exceptions of the work that were logged."""
        self._dropped: Counter[str] = Counter()
        """Reasons of the permits that were dropped since the last submitted group."""
        self._warn_at = _DROPPED_IN_A_ROW
        self._idle_since = time.monotonic()
        self._guard = asyncio.TaskGroup()
        self._renewals: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> PermitSession:
        """Registers the environment. Gives back the permits that an earlier process with the same name left.

        Waits if the API has tokens and the earlier process had another word: its registration must expire. Raises
        ApiError `other_registration` if that process is alive.
        """
        with self._refusing_another_run():
            await self._register_first()
            await self._api.abandon_permits(self._run_id, self._holder, creation=self.creation)
        await self._guard.__aenter__()
        self._renewals = [self._guard.create_task(renew()) for renew in (self._renew_permits, self._renew_registration)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Gives back the permits and the registration. If the API is unreachable, they expire.

        Raises the first GristmillError of the body or of a renewal, without its ExceptionGroup.
        """
        for task in self._renewals:
            task.cancel()
        try:
            await self._guard.__aexit__(kind, error, at)
        except BaseExceptionGroup as group:
            if (first := _first(group)) is not None and first is not error:
                raise first from group
            if not isinstance(error, Exception):  # otherwise the error of the body is raised
                raise
        finally:
            await self._leave()

    async def run(self, work: Work, at_once: int = 8) -> None:
        """Runs `work` on every permit until the run is finished, then cancels the unfinished work.

        `at_once`: how many permits may generate at one time. The same number again may be in later stages; see
        `generated`. Cancels work whose permit was lost. An error of the work ends the session, unless `on_error` is
        "drop".
        """
        self.slots.places = at_once
        async with asyncio.TaskGroup() as tasks:
            while (grant := await self.take()) is not None:
                for permit in grant.permits:
                    assert self.version is not None  # the API issues no permits before a trainer has taken the run
                    tasks.create_task(self._do(work, permit, self.version))

    async def take(self) -> PermitGrant | None:
        """Waits for free places, and takes permits for them; none if no permit came free in 20 seconds.

        Returns None if the run is finished, after cancelling the unfinished work. Raises RunReplacedError.
        """
        # No spare permits, because another process could already work on them.
        free = min(await self.slots.free(), _MOST_PERMITS)
        with self._refusing_another_run():
            grant = await self._api.permits(self._run_id, self._holder, free, _POLL, creation=self.creation)
        if self.creation not in (None, grant.creation):
            raise self._replaced()
        self.creation = grant.creation or None
        self.version = None if grant.version is None else PolicyVersion.parse(grant.version)
        if grant.state is RunState.FINISHED:
            for task in self._held.values():
                if task is not None:
                    task.cancel()
            return None
        # After an outage a permit can come a second time while its first work is still running.
        permits = [permit for permit in grant.permits if permit.group_id not in self._held]
        for permit in permits:
            self._held[permit.group_id] = None
            self.slots.begin(permit.group_id)
        self._report_idle(grant)
        return grant.model_copy(update={"permits": permits})

    @contextlib.asynccontextmanager
    async def working(self, permit: Permit) -> AsyncIterator[None]:
        """Holds the permit while the current task works on it. The work ends with `submit` or `drop`.

        Cancels the task if the permit is lost, or if the run is finished. With `on_error` "drop", an exception of the
        block drops the permit and is not raised.
        """
        group_id = permit.group_id
        self._held[group_id] = asyncio.current_task()
        try:
            try:
                yield
            except Exception as error:
                if self._on_error == "raise" or _ends_session(error):
                    raise
                self._log_failure(group_id, error)
                await self.drop(permit, WORK_FAILED)
            if group_id not in self._settling:
                _LOG.warning("the work on group %s ended without submit or drop; the group is dropped", group_id)
                await self.drop(permit, "not_submitted")
        finally:
            del self._held[group_id]
            self._settling.discard(group_id)
            self.slots.end(group_id)

    def generated(self, permit: Permit) -> None:
        """Marks the permit's completions as generated, so that the next permit is requested while this one is scored.

        Without this call, the next permit is requested when the work ends.
        """
        self.slots.generated(permit.group_id)

    async def submit(self, group: TrajectoryGroup, result: RowResult | None = None) -> bool:
        """Submits the group for its permit. Returns False if the group is not needed any more.

        `result`: of the group, in a run whose rows may rest. Raises ApiError for any other refusal, such as
        `bad_group`.
        """
        try:
            with self._settles(group.group_id):
                await self._api.submit(group, self._holder, result=result, creation=self.creation)
        except ApiError as error:
            return self._not_needed(group.group_id, error)
        self._dropped.clear()
        self._warn_at = _DROPPED_IN_A_ROW
        return True

    async def drop(self, permit: Permit, reason: str, result: RowResult | None = None) -> bool:
        """Gives the permit up; its row is spent. Returns False if this process no longer had the permit.

        `reason`: 1 to 64 lower-case letters, digits and underscores. The run's status counts the reasons. `result`: of
        the group, if it was scored, in a run whose rows may rest.
        """
        try:
            with self._settles(permit.group_id):
                await self._api.return_permit(
                    self._run_id, self._holder, permit.group_id, reason, result=result, creation=self.creation
                )
        except ApiError as error:
            return self._not_needed(permit.group_id, error)
        self._dropped[reason] += 1
        if (count := self._dropped.total()) >= self._warn_at:
            self._warn_at = 2 * count
            reasons = ", ".join(f"{name} {number}" for name, number in self._dropped.most_common())
            _LOG.warning(
                "run %s: the last %d permits of %s were all dropped (%s); the trainer gets no groups from it",
                self._run_id, count, self._holder, reasons,
            )  # fmt: skip
        return True

    async def _do(self, work: Work, permit: Permit, version: PolicyVersion) -> None:
        async with self.working(permit):
            await work(permit, version)

    def _log_failure(self, group_id: str, error: Exception) -> None:
        """Logs the first exception of each kind at each line of code, because thousands may follow."""
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        place = ("", 0) if trace is None else (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        if (kind := (type(error), *place)) in self._logged:
            return
        self._logged.add(kind)
        _LOG.error(
            "the work on group %s failed, and the group is dropped; the same error at this line is not logged again",
            group_id,
            exc_info=error,
        )

    @contextlib.contextmanager
    def _settles(self, group_id: str) -> Iterator[None]:
        """Marks the group as settled while the block submits or drops it, and afterwards unless the block failed."""
        self._settling.add(group_id)
        try:
            with self._refusing_another_run():
                yield
        except Exception as error:
            if not (isinstance(error, ApiError) and error.code in _SETTLED):
                self._settling.discard(group_id)
            raise

    def _not_needed(self, group_id: str, error: ApiError) -> bool:
        if error.code not in _SETTLED:
            self._settling.discard(group_id)  # If the caller goes on, `working` drops the group.
            raise error
        _LOG.warning("group %s is not needed any more: %s", group_id, error)
        return False

    @contextlib.contextmanager
    def _refusing_another_run(self) -> Iterator[None]:
        """Raises RunReplacedError if another run has this run's id now, as after a long suspension of this process."""
        try:
            yield
        except ApiError as error:
            if error.code != ErrorCode.OTHER_CREATION:
                raise
            raise self._replaced() from error

    def _replaced(self) -> RunReplacedError:
        return RunReplacedError(
            "run_replaced",
            f"run {self._run_id} was deleted and created again since this process began; start the process again",
            run=self._run_id,
        )

    def _report_idle(self, grant: PermitGrant) -> None:
        now = time.monotonic()
        if self._held:
            self._idle_since = now
        elif now - self._idle_since > _REPORT_IDLE_AFTER:
            self._idle_since = now
            cause = "a trainer to take the run" if grant.version is None else "the trainer's next step"
            _LOG.info("run %s: nothing to do for a minute; waiting for %s", self._run_id, cause)

    async def _renew_permits(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat)
            if not self._held:
                continue
            with self._refusing_another_run():
                lost = await self._api.renew_permits(
                    self._run_id, self._holder, list(self._held), creation=self.creation
                )
            for group_id in lost:
                # The API reports a permit as "lost" while this process submits or drops it.
                if (task := self._held.get(group_id)) is not None and group_id not in self._settling:
                    _LOG.info("the permit of group %s is lost or not needed any more; its work is given up", group_id)
                    task.cancel()

    async def _renew_registration(self) -> None:
        """Reports that the environment is alive. A process whose work fills all places requests no permits."""
        while True:
            await asyncio.sleep(self._beat_every)
            try:
                await self._beat()
            except GristmillError as error:  # The calls for permits decide whether the process can continue.
                _LOG.warning("the heartbeat of %s failed: %s", self._holder, error)

    async def _beat(self) -> None:
        try:
            await self._api.heartbeat_env(self._run_id, self._holder, creation=self.creation)
        except ApiError as error:
            if error.code != ErrorCode.ENV_MISSING:
                raise
            await self._register()

    async def _register_first(self) -> None:
        refused_at = time.monotonic()
        logged = False
        while True:
            try:
                return await self._register()
            except ApiError as error:
                if error.code != ErrorCode.OTHER_REGISTRATION:
                    raise
                # Before the question, because the answer may travel for longer than the predecessor is silent.
                waited = time.monotonic() - refused_at
                silent = await self._silent_for()
                if silent is not None and silent < waited - _ROUNDING:
                    raise
                if not logged:
                    _LOG.warning("waiting until the registration of an earlier process expires: %s", error)
                    logged = True
            await asyncio.sleep(self._beat_every)

    async def _silent_for(self) -> float | None:
        """Returns the seconds since the environment of this name last called the API; None without a registration."""
        environments = await self._api.environments(self._run_id)
        return next((one.last_seen_s for one in environments if one.env_id == self._holder), None)

    async def _register(self) -> None:
        await self._api.register_env(self._run_id, self._holder, self._weight, self._beat_every, creation=self.creation)

    async def _leave(self) -> None:
        try:
            async with asyncio.timeout(_GOODBYE):
                await self._api.abandon_permits(self._run_id, self._holder, creation=self.creation)
                await self._api.leave_env(self._run_id, self._holder, creation=self.creation)
        except (TimeoutError, GristmillError) as error:
            why = str(error) or f"no answer within {_GOODBYE:g} s"
            _LOG.warning("permits could not be given back (%s); they expire by themselves", why)


class Slots:
    """Places for groups: `places` at the model servers, and the same number again in later stages.

    A group leaves its place at the model servers when its completions are finished, so the servers never wait for
    scores or storage. An environment may close places while it evaluates.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._groups: set[str] = set()
        self._generating: set[str] = set()
        self._changed = asyncio.Event()

    @property
    def places(self) -> int:
        """How many groups may be at the model servers now."""
        return self._places

    @places.setter
    def places(self, places: int) -> None:
        self._places = places
        self._changed.set()

    @property
    def generating(self) -> int:
        """How many groups are at the model servers."""
        return len(self._generating)

    @property
    def later(self) -> int:
        """How many groups are in later stages: their completions are scored or stored."""
        return len(self._groups) - len(self._generating)

    async def free(self) -> int:
        """Waits until a place is free, and returns the number of free places."""
        while (free := min(self._places - len(self._generating), 2 * self._places - len(self._groups))) <= 0:
            await self._next_change()
        return free

    async def opened(self) -> None:
        """Waits until groups may begin."""
        while self._places == 0:
            await self._next_change()

    def begin(self, group_id: str) -> None:
        """Gives the group a place at the model servers."""
        self._groups.add(group_id)
        self._generating.add(group_id)

    def generated(self, group_id: str) -> None:
        """Frees the group's place at the model servers."""
        self._generating.discard(group_id)
        self._changed.set()

    def end(self, group_id: str) -> None:
        """Frees all places of the group."""
        self._groups.discard(group_id)
        self.generated(group_id)

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


def _ends_session(error: BaseException) -> bool:
    """Returns whether an exception of the work concerns every permit, so that the next work would fail too."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(_ends_session, error.exceptions))
    if isinstance(error, ApiError):
        return error.code not in _OF_ONE_GROUP
    return isinstance(error, ApiUnreachable | RunReplacedError) or not isinstance(error, Exception)


def _first(group: BaseExceptionGroup[BaseException]) -> GristmillError | None:
    """Returns the first GristmillError in the group."""
    for error in group.exceptions:
        first = _first(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(first, GristmillError):
            return first
    return None
