"""LeaseSession and PermitSession keep batches and permits alive at a real API, and give back the rest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from tests.integration.api.store_harness import RUN
from tests.support.api_server import ApiServer
from tests.support.errors import raises
from tests.support.groups import make_group
from tests.support.redis_server import RedisServer
from tests.support.scripted_run import ENV, GROUP_SIZE, GROUPS_PER_STEP, expected_group, plan

from gristmill import (
    ApiError,
    Client,
    GristmillError,
    LeaseLostError,
    LeaseSession,
    Permit,
    PermitSession,
    PolicyVersion,
    SyncClient,
)

TTL = 3.0
"""Seconds that leases, permits and environments last without a heartbeat."""
NEVER = 1000.0


@pytest.fixture(scope="module")
def server(shared_redis: RedisServer) -> Iterator[ApiServer]:
    ttl = str(TTL)
    with ApiServer(shared_redis.api_url, API_LEASE_TTL_S=ttl, API_PERMIT_TTL_S=ttl, API_ENV_TTL_S=ttl) as server:
        yield server


@pytest.fixture
def api(redis_url: str, server: ApiServer) -> Iterator[SyncClient]:
    """A client of an open run without a trainer."""
    with SyncClient(server.url, patience=10) as api:
        api.create_run(RUN, ENV, GROUP_SIZE)
        yield api


@pytest.fixture
async def env_api(api: SyncClient, server: ApiServer) -> AsyncIterator[Client]:
    """An environment's client of the run, which has a trainer and one step of permits."""
    incarnation, _ = api.take(RUN, plan(1, staleness=0), [])
    api.record_version(RUN, PolicyVersion(incarnation, 0))
    async with Client(server.url, patience=10) as client:
        yield client


def _fill(api: SyncClient, steps: int) -> list[str]:
    """Submits the groups of some steps. Returns their ids."""
    permits = api.permits(RUN, "env-1", steps * GROUPS_PER_STEP, wait=0).permits
    assert len(permits) == steps * GROUPS_PER_STEP
    for permit in permits:
        api.submit(expected_group(RUN, permit.group_id), "env-1")
    return [permit.group_id for permit in permits]


def test_lease_session_keeps_a_batch_longer_than_a_lease_lasts(api: SyncClient) -> None:
    with LeaseSession(api, RUN, plan(4), heartbeat=TTL / 10) as session:
        session.record_version(0)
        ids = _fill(api, 2)
        first = session.lease(1, wait=5)
        assert first is not None
        assert [group.group_id for group in first] == ids[:GROUPS_PER_STEP]
        time.sleep(2 * TTL)
        second = session.lease(2, wait=5)  # An expired batch would be leased again here.
        assert second is not None
        assert [group.group_id for group in second] == ids[GROUPS_PER_STEP:]
        session.trained(1)
        session.ack()
        assert api.audit(RUN).trained == ids[:GROUPS_PER_STEP]
        assert session.covered == []


def test_lease_session_returns_untrained_batches_at_its_end_and_keeps_trained_ones_leased(api: SyncClient) -> None:
    with LeaseSession(api, RUN, plan(4), heartbeat=NEVER) as session:
        session.record_version(0)
        ids = _fill(api, 2)
        for step in (1, 2):
            assert session.lease(step, wait=5) is not None
        session.trained(1)
        assert session.covered == ids[:GROUPS_PER_STEP]
        with pytest.raises(ValueError, match=r"1\.1"):
            session.give_back(1)
        with pytest.raises(ValueError, match=r"1\.1"):
            session.lease(1, wait=0)
    audit = api.audit(RUN)
    assert (audit.leased, audit.ready) == (ids[:GROUPS_PER_STEP], ids[GROUPS_PER_STEP:])


def test_lease_session_keeps_its_batches_leased_after_an_error_of_gristmill(api: SyncClient) -> None:
    """The API may be unreachable, and then a call would delay the end of the program."""
    with raises(GristmillError, "stopped"), LeaseSession(api, RUN, plan(4), heartbeat=NEVER) as session:
        session.record_version(0)
        ids = _fill(api, 1)
        assert session.lease(1, wait=5) is not None
        raise GristmillError("stopped", "stopped on request")
    assert api.audit(RUN).leased == ids


def test_next_session_settles_the_groups_of_its_checkpoint(api: SyncClient) -> None:
    with LeaseSession(api, RUN, plan(4), heartbeat=NEVER) as killed:
        killed.record_version(0)
        ids = _fill(api, 1)
        assert killed.lease(1, wait=5) is not None
        killed.trained(1)
        covered, creation = killed.covered, killed.run.creation
    with LeaseSession(api, RUN, plan(4), covered=covered, step=1, creation=creation, heartbeat=NEVER) as session:
        assert session.incarnation == killed.incarnation + 1
        assert api.audit(RUN).trained == ids
        session.record_version(1)
        session.report_metrics(1, {"loss": 0.5})
        session.finish()
    assert [row.step for row in api.metrics(RUN, "trainer")] == [1]
    with raises(ApiError, "finished"), LeaseSession(api, RUN, plan(4)):
        pass


def test_lease_session_raises_a_lost_lease_with_the_next_call(api: SyncClient) -> None:
    with LeaseSession(api, RUN, plan(4), heartbeat=0.1) as session:
        session.record_version(0)
        _fill(api, 1)
        assert session.lease(1, wait=5) is not None
        api.nack(RUN, session.incarnation, ["1.1"])  # as if the lease had expired and another had the groups
        _until_failed(session)
        with raises(LeaseLostError, "lease_lost", batches=["1.1"]):
            session.lease(2, wait=0)
        session.trained(1)
        with raises(LeaseLostError, "lease_lost"):
            session.ack()


def test_lease_session_refuses_a_group_that_it_already_has(api: SyncClient) -> None:
    with LeaseSession(api, RUN, plan(4), heartbeat=NEVER) as session:
        session.record_version(0)
        ids = _fill(api, 1)
        assert session.lease(1, wait=5) is not None
        session.trained(1)
        api.nack(RUN, session.incarnation, ["1.1"])
        with raises(LeaseLostError, "lease_lost", batches=["1.2"], groups=ids):
            session.lease(2, wait=5)


def test_lease_session_of_a_replaced_trainer_raises_fenced(api: SyncClient) -> None:
    with LeaseSession(api, RUN, plan(4), heartbeat=0.1) as session:
        session.record_version(0)
        _fill(api, 1)
        assert session.lease(1, wait=5) is not None
        api.take(RUN, plan(4), [])
        _until_failed(session)
        with raises(ApiError, "fenced"):
            session.ack()


def _until_failed(session: LeaseSession) -> None:
    session._thread.join(30)
    assert not session._thread.is_alive()


async def _submitted(session: PermitSession, permit: Permit) -> bool:
    return await session.submit(expected_group(RUN, permit.group_id))


async def test_permit_session_works_until_the_run_is_finished(env_api: Client) -> None:
    async def work(permit: Permit, version: PolicyVersion) -> None:
        assert version == session.version == PolicyVersion(1, 0)
        if permit.row == 0:
            assert await session.drop(permit, "same_scores")
        else:
            assert await _submitted(session, permit)
        done.append(permit.row)
        if len(done) == GROUPS_PER_STEP + 1:
            await env_api.finish(RUN, 1)

    done: list[int] = []
    async with PermitSession(env_api, RUN, "env-1", weight=2.0) as session:
        await session.run(work, at_once=3)
    assert sorted(done) == [*range(GROUPS_PER_STEP + 1)]
    assert (await env_api.status(RUN)).dropped == {"same_scores": 1}
    assert await env_api.environments(RUN) == []


async def test_permit_session_keeps_permit_and_registration_longer_than_they_last(env_api: Client) -> None:
    async def work(permit: Permit, version: PolicyVersion) -> None:
        await asyncio.sleep(2 * TTL)
        (env,) = await env_api.environments(RUN)
        assert env.alive
        assert await _submitted(session, permit)
        await env_api.finish(RUN, 1)

    async with PermitSession(env_api, RUN, "env-1", heartbeat=TTL / 10) as session:
        await session.run(work, at_once=1)
    assert len((await env_api.audit(RUN)).ready) == 1


async def test_permit_session_cancels_work_whose_permit_was_lost(env_api: Client) -> None:
    rows: list[int] = []

    async def work(permit: Permit, version: PolicyVersion) -> None:
        rows.append(permit.row)
        if len(rows) == 1:
            await env_api.return_permit(RUN, "env-1", permit.group_id, "taken_away")
            try:
                await asyncio.sleep(60)
            finally:
                rows.append(-1)
        await env_api.finish(RUN, 1)

    async with PermitSession(env_api, RUN, "env-1", heartbeat=0.1) as session:
        await asyncio.wait_for(session.run(work, at_once=1), 30)
    assert rows == [0, -1, 1]


async def test_permit_session_drops_a_group_that_the_work_forgot(env_api: Client) -> None:
    async def work(permit: Permit, version: PolicyVersion) -> None:
        if permit.row == 1:
            await _submitted(session, permit)
            await env_api.finish(RUN, 1)

    async with PermitSession(env_api, RUN, "env-1") as session:
        await session.run(work, at_once=1)
    assert (await env_api.status(RUN)).dropped == {"not_submitted": 1}


async def test_permit_session_drops_a_group_whose_refusal_the_work_ignores(env_api: Client) -> None:
    async def work(permit: Permit, version: PolicyVersion) -> None:
        if permit.row == 1:
            await env_api.finish(RUN, 1)
            return
        with raises(ApiError, "bad_group"):
            await session.submit(make_group(permit.group_id, RUN, lengths=((3, 40),)))

    async with PermitSession(env_api, RUN, "env-1") as session:
        await asyncio.wait_for(session.run(work, at_once=1), 30)
    assert (await env_api.status(RUN)).dropped == {"not_submitted": 1}


async def test_permit_session_requests_the_next_permit_when_the_completions_are_generated(env_api: Client) -> None:
    begun: list[Permit] = []
    second = asyncio.Event()

    async def work(permit: Permit, version: PolicyVersion) -> None:
        begun.append(permit)
        if len(begun) == 1:
            session.generated(permit)
            await second.wait()
        second.set()
        await env_api.finish(RUN, 1)

    async with PermitSession(env_api, RUN, "env-1") as session:
        await asyncio.wait_for(session.run(work, at_once=1), 30)
    assert len(begun) == 2


async def test_permit_session_raises_the_error_of_the_work_and_gives_its_permits_back(env_api: Client) -> None:
    async def refused(permit: Permit, version: PolicyVersion) -> None:
        await session.submit(expected_group("another-run", permit.group_id))

    async def broken(permit: Permit, version: PolicyVersion) -> None:
        raise ValueError("no reward")

    with raises(ApiError, "run_missing"):
        async with PermitSession(env_api, RUN, "env-1") as session:
            await session.run(refused)
    assert (await env_api.status(RUN)).outstanding == 0
    with pytest.raises(ExceptionGroup) as failed:
        async with PermitSession(env_api, RUN, "env-1") as session:
            await session.run(broken)
    assert failed.group_contains(ValueError, match="no reward")
    assert (await env_api.status(RUN)).outstanding == 0
