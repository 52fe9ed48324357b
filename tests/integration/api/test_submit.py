"""A submit is stored once, under a permit."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from redis.asyncio import Redis
from tests.integration.api.store_harness import PREFIX, RUN, StoreHarness, submission, trainer
from tests.support.errors import raises

from gristmill_api.errors import ApiProblem
from gristmill_api.settings import Limits
from gristmill_api.store import Store, keys


async def refusal(harness: StoreHarness, holder: str, group_id: str, content: str = "a") -> str:
    with pytest.raises(ApiProblem) as refused:
        await harness.submit(holder, group_id, content)
    return refused.value.code


async def test_retried_submit_succeeds_in_every_later_state_of_the_group(harness: StoreHarness) -> None:
    incarnation = await harness.start()
    (group,) = await harness.ask("env-1", 1)
    assert await harness.submit("env-1", group)
    assert not await harness.submit("env-1", group)
    assert await refusal(harness, "env-1", group, "b") == "conflict"
    await harness.lease(incarnation, "b1", 1)
    assert not await harness.submit("env-1", group)
    await harness.store.queue.ack(RUN, incarnation, ["b1"])
    assert not await harness.submit("env-1", group), "trained: the payload is gone, the digest is not"
    assert await refusal(harness, "env-1", group, "b") == "conflict"
    await harness.store.runs.finish(RUN, incarnation)
    assert not await harness.submit("env-1", group)
    assert await harness.whereabouts() == {"trained": [group]}


async def test_a_submit_consumes_its_permit(harness: StoreHarness) -> None:
    await harness.start()
    (group,) = await harness.ask("env-1", 1)
    await harness.submit("env-1", group)
    status = await harness.store.runs.status(RUN)
    assert (status.outstanding, status.accepted, status.ready, status.bytes) == (0, 1, 1, 100)
    assert await harness.store.permits.release_all(RUN, "env-1") == 0


async def test_late_submit_is_accepted_until_another_environment_has_the_permit(harness: StoreHarness) -> None:
    incarnation = await harness.start()
    a, b, c, d = await harness.ask("env-1", 4)
    await harness.expire_permits(a, b, c)
    assert await harness.submit("env-1", a), "expired, and no call has found it yet"
    assert await harness.ask("env-2", 1) == [b]
    assert await refusal(harness, "env-1", b) == "permit_lost"
    assert await harness.submit("env-1", c), "found expired, and no environment holds it"
    await harness.store.permits.release_all(RUN, "env-1")
    assert await harness.submit("env-1", d), "abandoned, and no environment holds it"
    assert await harness.submit("env-2", b, "b")
    assert await harness.whereabouts() == {"ready": [a, c, d, b]}
    assert await harness.ask("env-3", 9) == [], "the step's four groups are accepted"
    await harness.store.runs.record_version(RUN, incarnation, 1)
    assert await harness.ask("env-3", 1) == ["g00000004"], "a permit that was used is not issued again"


async def test_submit_is_not_confirmed_if_its_payload_key_is_gone(harness: StoreHarness) -> None:
    """The bytes are under a separate key until the script takes them. If that key is gone by then, the script does
    not confirm the submit."""
    await harness.start()
    (group,) = await harness.ask("env-1", 1)
    gone = ("env-1", b"digest", 2, 10, 100, "env-1", 0, 1 << 30, 1 << 30, 100, 100, "gm:{run-1}:sent:never")
    assert await harness.store.scripts.run("submit", PREFIX, group, *gone) == [b"GONE"]
    assert await harness.whereabouts() == {"outstanding": [group]}
    assert await harness.submit("env-1", group)


async def test_two_holders_race_and_exactly_one_is_stored(harness: StoreHarness) -> None:
    await harness.start(groups=16)
    groups = await harness.ask("env-1", 16)
    await harness.expire_permits(*groups)
    asking: list[list[str]] = []
    stored: list[str] = []
    refusals: set[str] = set()

    async def late(group: str) -> None:
        try:
            assert await harness.submit("env-1", group, "1")
            stored.append(group)
        except ApiProblem as refused:
            refusals.add(refused.code)

    async def ask() -> None:
        asking.append(await harness.ask("env-2", 1))

    await asyncio.gather(*(call for group in groups for call in (ask(), late(group))))
    granted = [group for ids in asking for group in ids]
    assert sorted(granted + stored) == groups, "each went one way or the other"
    assert refusals <= {"permit_lost"}
    for group in granted:
        assert await harness.submit("env-2", group, "2")
    assert sorted((await harness.whereabouts())["ready"]) == groups


async def test_ids_that_were_never_issued_and_wrong_sizes_are_refused(harness: StoreHarness) -> None:
    await harness.start()
    assert await refusal(harness, "env-1", "g00000000") == "permit_lost"
    (group,) = await harness.ask("env-1", 1)
    big = submission(group)
    for sequences in (3, 1):
        wrong = dataclasses.replace(big, sequences=sequences)
        with raises(ApiProblem, "bad_group") as refused:
            await harness.store.queue.submit(RUN, "env-1", wrong)
        assert all(value in refused.value.message for value in (repr(group), f" {sequences} ", "group_size", " 2"))
        assert await harness.whereabouts() == {"outstanding": [group]}


@pytest.mark.parametrize(("group_size", "sequences"), [(4, 4), (4, 3), (4, 2), (1, 1)])
async def test_group_may_lack_unscored_completions(redis: Redis, group_size: int, sequences: int) -> None:
    harness = StoreHarness(Store(redis, Limits()), redis)
    await harness.store.runs.create(RUN, {"dataset": "d"}, group_size)
    incarnation = (await harness.store.runs.take(RUN, trainer(groups=4), [])).incarnation
    await harness.store.runs.record_version(RUN, incarnation, 0)
    (group,) = await harness.ask("env-1", 1)
    smaller = dataclasses.replace(submission(group), sequences=sequences)
    assert await harness.store.queue.submit(RUN, "env-1", smaller)
    assert (await harness.store.runs.status(RUN)).sequences["ready"] == sequences
    assert await harness.lease(incarnation, "b1", 1) == [group]


async def test_stored_payload_does_not_expire(harness: StoreHarness) -> None:
    """Until the script takes the bytes, they are under a key that expires."""
    await harness.start()
    (group,) = await harness.fill(1)
    assert await harness.redis.pttl(keys.payload(RUN, group)) == -1
