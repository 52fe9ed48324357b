"""The places of groups, and the renewal of permits."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Literal

import pytest
from tests.support.errors import raises

from gristmill import (
    ApiError,
    ApiUnreachable,
    Environment,
    ErrorCode,
    GristmillError,
    Permit,
    PermitGrant,
    PermitSession,
    PolicyVersion,
    RunReplacedError,
    RunState,
)
from gristmill.permits import Slots
from gristmill_api.routes.permits import Ask


async def _free(slots: Slots) -> int:
    """Returns the free places; 0 if a caller would wait."""
    try:
        async with asyncio.timeout(0.05):
            return await slots.free()
    except TimeoutError:
        return 0


def _begin(slots: Slots, *groups: str) -> None:
    for group in groups:
        slots.begin(group)


async def test_generated_group_frees_its_place_at_the_model_servers_once() -> None:
    slots = Slots(2)
    _begin(slots, "a", "b")
    assert await _free(slots) == 0
    slots.generated("a")
    assert await _free(slots) == 1
    slots.begin("c")
    slots.end("a")
    assert await _free(slots) == 0


async def test_later_stages_take_at_most_as_many_groups_as_the_model_servers() -> None:
    slots = Slots(2)
    for group in "abcd":
        slots.begin(group)
        slots.generated(group)
    assert await _free(slots) == 0
    slots.end("a")
    assert await _free(slots) == 1


async def test_waiting_callers_continue_when_places_open() -> None:
    slots = Slots(2)
    slots.places = 0
    waiting = [asyncio.create_task(slots.opened()), asyncio.create_task(slots.opened())]
    free = asyncio.create_task(slots.free())
    await asyncio.sleep(0.01)
    assert not any(task.done() for task in (*waiting, free))
    slots.places = 1
    async with asyncio.timeout(5):
        await asyncio.gather(*waiting)
        assert await free == 1


async def test_closed_places_count_groups_that_have_begun() -> None:
    slots = Slots(4)
    _begin(slots, "a", "b")
    slots.places = 1
    assert await _free(slots) == 0
    slots.end("a")
    assert await _free(slots) == 0
    slots.end("b")
    assert await _free(slots) == 1


class Api:
    """Grants one permit again and again, and reports as lost what a test names."""

    def __init__(self) -> None:
        self.lost: list[str] = []
        self.state = RunState.OPEN
        self.error: Exception | None = None
        self.calls: list[str] = []
        self.heartbeat_s: object = None

    async def permits(self, *arguments: object, **named: object) -> PermitGrant:
        await asyncio.sleep(0)
        return PermitGrant(permits=[Permit(group_id="g0", row=0)], state=self.state, version="1.0")

    async def renew_permits(self, run: str, holder: str, group_ids: list[str], **named: object) -> list[str]:
        self.calls.append("renew_permits")
        if self.error is not None:
            raise self.error
        return [name for name in group_ids if name in self.lost]

    async def return_permit(self, *arguments: object, **named: object) -> None:
        self.calls.append("return_permit")
        self.lost.append("g0")
        await asyncio.sleep(0.1)

    async def register_env(self, *arguments: object, **named: object) -> None:
        self.calls.append("register_env")
        self.heartbeat_s = arguments[3]

    async def heartbeat_env(self, *arguments: object, **named: object) -> None:
        self.calls.append("heartbeat_env")

    async def abandon_permits(self, *arguments: object, **named: object) -> None:
        self.calls.append("abandon_permits")

    async def leave_env(self, *arguments: object, **named: object) -> None:
        self.calls.append("leave_env")


def _session(api: Any) -> PermitSession:
    return PermitSession(api, "run", "env", heartbeat=0.01)


async def test_answer_that_travels_long_does_not_make_a_dead_predecessor_alive() -> None:
    class Away(Api):
        """Its environment of this name called for the last time before this process was refused."""

        async def environments(self, run: str) -> list[Environment]:
            answer = [Environment(env_id="env", weight=1.0, alive=True, last_seen_s=0.05)]
            await asyncio.sleep(0.5)
            return answer

        async def register_env(self, *arguments: object, **named: object) -> None:
            await super().register_env(*arguments, **named)
            if self.calls.count("register_env") == 1:
                raise ApiError(ErrorCode.OTHER_REGISTRATION, 409, "another environment has the name")

    async with _session(api := Away()):
        pass
    assert api.calls.count("register_env") == 2


async def _permits(session: PermitSession) -> list[Permit]:
    grant = await session.take()
    assert grant is not None
    return grant.permits


async def test_permit_that_comes_again_during_its_work_is_not_taken_twice() -> None:
    session = _session(Api())
    (permit,) = await _permits(session)
    assert await _permits(session) == []
    async with session.working(permit):
        assert await _permits(session) == []
        await session.drop(permit, "bad_row")
    assert await _permits(session) == [permit]


async def test_session_with_many_places_asks_for_as_many_permits_as_the_api_grants_at_once() -> None:
    class Counting(Api):
        async def permits(self, *arguments: object, **named: object) -> PermitGrant:
            Ask.model_validate({"holder": arguments[1], "count": arguments[2]})
            return await super().permits(*arguments, **named)

    session = _session(Counting())
    session.slots.places = 2000
    assert len(await _permits(session)) == 1


async def test_work_gets_the_version_of_the_session() -> None:
    api = Api()
    versions: list[PolicyVersion | None] = []

    async def work(permit: Permit, version: PolicyVersion) -> None:
        versions.extend([version, session.version])
        await session.drop(permit, "bad_row")
        api.state = RunState.FINISHED

    async with _session(api) as session:
        await session.run(work, at_once=1)
    assert versions[:2] == [PolicyVersion(1, 0)] * 2


async def test_work_under_a_lost_permit_is_cancelled() -> None:
    api = Api()
    async with _session(api) as session:
        (permit,) = await _permits(session)

        async def work() -> None:
            async with session.working(permit):
                await asyncio.sleep(60)

        working = asyncio.create_task(work())
        await asyncio.sleep(0.05)
        assert not working.done()
        api.lost.append("g0")
        await asyncio.wait([working], timeout=5)
        assert working.cancelled()


async def test_permit_that_is_reported_as_lost_while_it_is_given_back_is_not_cancelled() -> None:
    async with _session(Api()) as session:
        (permit,) = await _permits(session)

        async def work() -> bool:
            async with session.working(permit):
                return await session.drop(permit, "bad_row")

        assert await asyncio.create_task(work())


async def test_end_of_the_run_cancels_the_work_and_grants_nothing() -> None:
    api = Api()
    session = _session(api)
    (permit,) = await _permits(session)

    async def work() -> None:
        async with session.working(permit):
            await asyncio.sleep(60)

    working = asyncio.create_task(work())
    api.state = RunState.FINISHED
    assert await session.take() is None
    await asyncio.wait([working], timeout=5)
    assert working.cancelled()


async def test_failed_renewal_ends_the_body_and_gives_everything_back() -> None:
    api = Api()
    api.error = ApiError("run_missing", 404, "no run")
    with raises(ApiError, "run_missing"):
        async with _session(api) as session:
            await session.take()
            await asyncio.sleep(60)
    assert api.calls[-2:] == ["abandon_permits", "leave_env"]


async def test_body_keeps_its_own_error_and_its_heartbeats_until_the_end() -> None:
    api = Api()

    async def fails() -> None:
        async with _session(api):
            await asyncio.sleep(0.1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fails()
    assert "heartbeat_env" in api.calls
    assert api.heartbeat_s == 0.01, "the API knows when the next heartbeat is late"
    assert api.calls[-2:] == ["abandon_permits", "leave_env"]


async def test_cancelled_session_gives_everything_back() -> None:
    api = Api()

    async def serve() -> None:
        async with _session(api) as session:
            await session.run(lambda permit, version: asyncio.sleep(60), at_once=1)

    serving = asyncio.create_task(serve())
    await asyncio.sleep(0.05)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert api.calls[-2:] == ["abandon_permits", "leave_env"]


class Rows(Api):
    """Grants the permits of `rows` rows one after the other, and then ends the run."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = iter(range(rows))
        self.returned: list[str] = []
        self.submitted = 0

    async def permits(self, *arguments: object, **named: object) -> PermitGrant:
        row = next(self.rows, None)
        permits = [] if row is None else [Permit(group_id=f"g{row}", row=row, run_id="run", holder="env")]
        return PermitGrant(permits=permits, state=RunState.OPEN if permits else RunState.FINISHED, version="1.0")

    async def return_permit(self, *arguments: object, **named: object) -> None:
        self.returned.append(str(arguments[3]))

    async def submit(self, *arguments: object, **named: object) -> bool:
        self.submitted += 1
        return True

    async def serve(self, work: Any, on_error: Literal["raise", "drop"]) -> None:
        client: Any = self
        async with PermitSession(client, "run", "env", on_error=on_error) as session:
            self.session = session
            while (grant := await session.take()) is not None:
                for permit in grant.permits:
                    async with session.working(permit):
                        await work(permit)


def _fail(error: Exception) -> None:
    raise error


async def test_exceptions_of_the_work_drop_their_permits_and_each_kind_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    api = Rows(6)

    async def work(permit: Permit) -> None:
        if permit.row < 3:
            _fail(ValueError(f"row {permit.row}"))
        elif permit.row == 3:
            _fail(ApiError(ErrorCode.BAD_GROUP, 400, "wrong"))
        elif permit.row == 4:
            raise ValueError("at another line")
        else:
            await api.session.drop(permit, "same_scores")

    await api.serve(work, "drop")
    assert api.returned == ["work_failed"] * 5 + ["same_scores"]
    logged = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert [str(error) for error in logged] == ["row 0", "wrong", "at another line"]


@pytest.mark.parametrize(
    "error",
    [
        ApiUnreachable("api_unreachable", "away"),
        RunReplacedError("run_replaced", "another run"),
        ApiError(ErrorCode.SUSPENDED, 409, "suspended"),
        ExceptionGroup("of tasks", [ValueError("row"), ApiUnreachable("api_unreachable", "away")]),
    ],
)
async def test_error_that_concerns_every_permit_ends_the_session_although_errors_drop(error: Exception) -> None:
    async def work(permit: Permit) -> None:
        raise error

    with pytest.raises((GristmillError, ExceptionGroup)):
        await Rows(2).serve(work, "drop")


async def test_exception_of_the_work_ends_the_session_by_default() -> None:
    async def work(permit: Permit) -> None:
        raise ZeroDivisionError

    api = Rows(2)
    with pytest.raises(ZeroDivisionError):
        await api.serve(work, "raise")
    assert api.returned == []


async def test_group_whose_refused_submit_or_drop_the_work_catches_is_dropped() -> None:
    class Refusing(Rows):
        async def submit(self, *arguments: object, **named: object) -> bool:
            raise ApiError(ErrorCode.TOO_LARGE, 413, "too large")

        async def return_permit(self, *arguments: object, **named: object) -> None:
            if arguments[3] == "No reason":
                raise ApiError(ErrorCode.BAD_REQUEST, 422, "wrong")
            await super().return_permit(*arguments, **named)

    async def work(permit: Permit) -> None:
        group: Any = permit
        with pytest.raises(ApiError):
            await (api.session.submit(group) if permit.row else api.session.drop(permit, "No reason"))

    api = Refusing(2)
    await api.serve(work, "raise")
    assert api.returned == ["not_submitted"] * 2


async def test_permits_that_are_all_dropped_are_warned_about_with_the_reasons(caplog: pytest.LogCaptureFixture) -> None:
    api = Rows(200)

    async def work(permit: Permit) -> None:
        if permit.row == 20:
            group: Any = permit
            await api.session.submit(group)
        elif permit.row < 20:
            await api.session.drop(permit, "too_long")
        else:
            await api.session.drop(permit, "same_scores" if permit.row % 2 else "bad_row")

    await api.serve(work, "raise")
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [f"last {count} permits" in text for count, text in zip((32, 64, 128), warned, strict=True)] == [True] * 3
    assert "same_scores 16" in warned[0]
    assert "bad_row 16" in warned[0]
    assert "too_long" not in warned[0], "a group was submitted since"
