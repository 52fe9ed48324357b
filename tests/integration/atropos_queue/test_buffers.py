"""Submits to the queue: all groups or none, exactly once, and pieces of groups that wait for each other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import redis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis
from tests.integration.api.event_listener import NOTHING, EventListener
from tests.integration.api.store_harness import trainer
from tests.integration.atropos_queue.store_harness import RUN, START, StoreHarness, as_stored, names, scored
from tests.support.errors import raises

from gristmill_api.errors import ApiProblem
from gristmill_api.settings import Limits
from gristmill_api.store import LeaseSize, keys


async def test_submit_queues_groups_in_order_of_arrival(harness: StoreHarness) -> None:
    await harness.start()
    listener = EventListener(harness.redis, RUN)
    await listener.open()
    number = await harness.env(group_size=2)
    await listener.recorded()
    texts = [b"a" * 20, b"b" * 30, b"c" * 40]
    groups = [scored(2, number, texts[0]), scored(3, None, texts[1]), scored(2, 99, texts[2])]
    submitted = [
        {"kind": "submit", "group": name, "env": env, "sequences": str(size), "tokens": str(10 * size)}
        for name, env, size in zip(names(0, 1, 2), (str(number), "", "99"), (2, 3, 2), strict=True)
    ]
    assert await listener.recorded(harness.queue.submit("r1", groups)) == ({f"ready {START}"}, submitted)
    await listener.close()
    assert await harness.ready() == names(0, 1, 2)
    assert [await harness.store.queue.payload(RUN, name) for name in names(0, 1, 2)] == [
        as_stored(row, text) for row, text in enumerate(texts)
    ]
    assert [await harness.redis.pttl(keys.payload(RUN, name)) for name in names(0, 1, 2)] == [-1] * 3, "they stay"
    facts = await harness.redis.hgetall(START + "group:a00000001")
    assert facts[b"bytes"] == b"30"
    assert (facts[b"step"], facts[b"env_id"]) == (b"", b"")
    status = await harness.store.runs.status(RUN)
    assert (status.bytes, status.accepted, status.sequences["ready"]) == (90, 3, 7)
    assert int(await harness.redis.get(keys.BYTES) or 0) == 90


async def test_repeated_submit_is_stored_once(harness: StoreHarness) -> None:
    await harness.start()
    number = await harness.env(group_size=4)
    listener = EventListener(harness.redis, RUN)
    await listener.open()
    assert await harness.queue.submit("r1", [scored(2, number), scored(4, number)]) == [2, None]
    await listener.recorded()
    assert await harness.queue.submit("r1", [scored(2, number), scored(4, number)]) == [2, None]
    assert await listener.recorded() == NOTHING
    await listener.close()
    for _ in range(3):
        assert await harness.queue.submit("r2", [scored(2, number)]) == [0], "it completes a group"
    assert await harness.queue.submit("none", []) == []
    assert await harness.ready() == names(1, 0, 2)
    ttl = await harness.redis.pttl(START + "atropos:receipt:r1")
    assert 590_000 < ttl <= 600_000
    await harness.store.runs.close(RUN)
    assert await harness.queue.submit("r1", [scored(2, number), scored(4, number)]) == [2, None], "also later"


async def test_submit_with_an_expired_payload_key_stores_nothing(harness: StoreHarness) -> None:
    await harness.start()
    one = (2, 20, "", START + "sent:never", "", "", 0, 9)
    bounds = 10**9, 10**9, 100, 100, 1000
    sent = await harness.store.scripts.run("atropos_submit", START, "r1", 1000, *bounds, "0.0", 9, *one)
    assert sent == [b"GONE"]
    assert await harness.ready() == []


async def test_group_records_the_version_served_at_its_arrival(harness: StoreHarness) -> None:
    await harness.start()
    number = await harness.env(group_size=4)
    await harness.redis.hset(START + "record", mapping={"version_incarnation": 2, "version_step": 7})
    await harness.submit(scored(2, number), scored(4))
    await harness.redis.hset(START + "record", "version_step", 8)
    await harness.submit(scored(2, number))
    steps = [await harness.redis.hget(START + f"group:{name}", "step") for name in names(0, 1, 2)]
    assert steps == [b"7", b"7", b"8"], "when they came, not when they were released"
    bodies = [await harness.store.queue.payload(RUN, name) for name in names(0, 1, 2)]
    expected = [as_stored(row, b"x" * 100, version) for row, version in enumerate(("2.7", "2.7", "2.8"))]
    assert bodies == expected, "the version is in the bytes"


async def test_fields_that_groups_lack_are_counted(harness: StoreHarness) -> None:
    await harness.start()
    await harness.submit(scored(left_out=("advantages", "images")), scored(left_out=("images",)), scored())
    assert (await harness.store.runs.status(RUN)).left_out == {"advantages": 1, "images": 2}


async def test_id_that_does_not_fit_in_a_group_is_refused(harness: StoreHarness) -> None:
    await harness.start()
    await harness.redis.hset(START + "counters", "rows", 10**8 - 2)
    await harness.submit(scored(), scored())
    with raises(ApiProblem, "too_many_groups"):
        await harness.submit(scored())
    assert await harness.ready() == names(10**8 - 2, 10**8 - 1)


async def test_native_lease_makes_groups_without_a_binary_form_dead_letters(harness: StoreHarness) -> None:
    """Also groups that waited in a buffer. Atropos' trainer gets them."""
    await harness.start()
    number = await harness.env(group_size=4)
    await harness.submit(scored(), scored(unusable="odd"), scored(2, number, unusable="piece"), scored(2, number))
    assert await harness.lend("atropos:1") == names(0, 1)
    await harness.queue.nack("atropos:1")
    record = await harness.store.runs.take(RUN, trainer(), [])
    batch = await harness.store.queue.lease(RUN, record.incarnation, "b", LeaseSize("groups", 2))
    assert ([group.group_id for group in batch.groups], batch.dead) == (list(names(0, 3)), 2)
    letters = await harness.store.dead_letters.all(RUN, 0, 9)
    reasons = {letter.group_id: letter.reason for letter in letters}
    assert reasons == dict(zip(names(1, 2), ("odd", "piece"), strict=True))


@pytest.mark.parametrize(
    ("limits", "quoted"),
    [
        (Limits(max_stored_bytes=300), ["300 ", " 300", "API_MAX_STORED_BYTES"]),
        (Limits(max_run_bytes=300), [repr(RUN), " 3 ", " 300 ", "API_MAX_RUN_BYTES"]),
        (Limits(max_run_groups=3), [repr(RUN), " 3 ", "API_MAX_RUN_GROUPS"]),
    ],
)
async def test_store_accepts_groups_up_to_each_cap_and_refuses_more(
    redis_url: str, limits: Limits, quoted: list[str]
) -> None:
    async with Redis.from_url(redis_url) as client:
        harness = StoreHarness(client, limits)
        await harness.start()
        number = await harness.env(group_size=4)
        await harness.submit(scored(2, number))
        with raises(ApiProblem, "store_full") as refused:
            await harness.submit(scored(4), scored(4), scored(4))
        assert refused.value.status == 429
        assert await harness.ready() == [], "all or none"
        assert await client.keys("*:sent:*") == [], "a refused body does not block the next one"
        await harness.submit(scored(4), scored(4))
        with raises(ApiProblem, "store_full") as refused:
            await harness.submit(scored(4))
        assert [value for value in quoted if value not in str(refused.value)] == []
        assert len(await harness.ready()) == 2
        assert (await harness.store.runs.status(RUN)).bytes == 300


@pytest.mark.parametrize("limits", [Limits(max_stored_bytes=100), Limits(max_run_bytes=100)], ids=["store", "run"])
async def test_the_first_group_may_have_as_many_bytes_as_the_cap(redis_url: str, limits: Limits) -> None:
    async with Redis.from_url(redis_url) as client:
        harness = StoreHarness(client, limits)
        await harness.start()
        await harness.submit(scored(4))
        assert await harness.ready() == names(0)


async def test_groups_in_every_state_count_against_the_cap(redis_url: str) -> None:
    async with Redis.from_url(redis_url) as client:
        harness = StoreHarness(client, Limits(max_run_groups=4, max_attempts=1), archive=True)
        await harness.start()
        await harness.submit(*[scored(4)] * 4)
        await harness.lend("atropos:1")
        await harness.queue.ack("atropos:1")
        await harness.lend("atropos:2")
        await harness.queue.nack("atropos:2")
        await harness.lend("atropos:3")
        status = await harness.store.runs.status(RUN)
        assert (status.ready, status.leased, status.dead, status.archiving) == (1, 1, 1, 1)
        with raises(ApiProblem, "store_full") as refused:
            await harness.submit(scored(4))
        assert all(value in str(refused.value) for value in (repr(RUN), " 4 ", "API_MAX_RUN_GROUPS"))


async def test_released_pieces_count_once_against_the_cap(redis_url: str) -> None:
    async with Redis.from_url(redis_url) as client:
        harness = StoreHarness(client, Limits(max_run_groups=4))
        await harness.start()
        number = await harness.env(group_size=2)
        for _ in range(2):
            assert await harness.submit(scored(1, number), scored(1, number)) == [1, 0]
        assert await harness.ready() == names(0, 1, 2, 3)
        with raises(ApiProblem, "store_full"):
            await harness.submit(scored(1, number))


async def test_pieces_wait_until_they_make_a_group(harness: StoreHarness) -> None:
    await harness.start()
    number, other = await harness.env(group_size=4), await harness.env(group_size=4)
    listener = EventListener(harness.redis, RUN)
    await listener.open()
    assert await harness.submit(scored(3, number, b"1" * 20)) == [3]
    assert await harness.submit(scored(2, other, b"2" * 30)) == [2], "another's buffer"
    assert await listener.recorded() == NOTHING
    status = await harness.store.runs.status(RUN)
    assert (status.bytes, status.ready, status.accepted) == (50, 0, 0)
    assert int(await harness.redis.get(keys.BYTES) or 0) == 50
    assert await harness.submit(scored(2, number)) == [5]
    assert await harness.submit(scored(4, number), scored(6, number)) == [None, None], "no piece"
    assert await harness.submit(scored(1, number, b"3" * 40)) == [2]
    assert await harness.ready() == names(3, 4, 0, 5)
    assert [await harness.store.queue.payload(RUN, name) for name in names(0, 5)] == [
        as_stored(0, b"1" * 20),
        as_stored(5, b"3" * 40),
    ]
    assert await harness.redis.hget(START + "group:a00000000", "env_id") == str(number).encode()
    assert (await harness.store.runs.status(RUN)).bytes == 20 + 30 + 100 + 200 + 40
    assert int(await harness.redis.get(keys.BYTES) or 0) == 390
    assert await harness.submit(scored(2, number)) == [0]
    assert await harness.redis.keys(START + "atropos:held:*") == [f"{START}atropos:held:a00000001".encode()]
    await listener.close()


async def test_buffered_pieces_are_queued_when_their_environment_disconnects(harness: StoreHarness) -> None:
    await harness.start()
    number = await harness.env(group_size=4)
    await harness.submit(scored(1, number), scored(1, number, unusable="odd"))
    assert await harness.queue.disconnect(number)
    assert await harness.ready() == names(0, 1)
    assert await harness.submit(scored(2, number)) == [None], "no piece follows that could complete it"
    assert await harness.lend("atropos:1") == names(0, 1, 2)
    assert await harness.redis.hget(START + "group:a00000001", "unusable") == b"odd"
    status = await harness.store.runs.status(RUN)
    assert (status.accepted, status.bytes, await harness.redis.hget(START + "counters", "buffered")) == (3, 300, b"0")


async def test_disconnection_from_a_finished_run_queues_nothing(harness: StoreHarness) -> None:
    await harness.start()
    number = await harness.env(group_size=4)
    await harness.submit(scored(2, number))
    await harness.store.runs.close(RUN)
    assert await harness.queue.disconnect(number)
    assert await harness.ready() == []


async def test_submit_counts_as_a_heartbeat_of_its_environment(harness: StoreHarness) -> None:
    await harness.start()
    number = await harness.env(group_size=4)
    await harness.silence(number)
    await harness.submit(scored(2, number), scored(2, 99))
    assert await harness.redis.zscore(START + "envs", str(number)) != 1
    assert await harness.redis.zcard(START + "envs") == 1, "an environment that never registered has no id"


async def test_full_buffer_releases_its_oldest_pieces(harness: StoreHarness) -> None:
    await harness.start()
    number = await harness.env(group_size=5)
    assert await harness.submit(*[scored(3, number)] * 64) == [3 * pieces for pieces in range(1, 65)]
    assert await harness.ready() == []
    assert await harness.submit(scored(3, number), scored(3, number)) == [192, 192]
    assert await harness.ready() == names(0, 1), "the oldest go as they are"
    assert (await harness.store.runs.status(RUN)).bytes == 6600


async def test_pieces_with_too_many_sums_are_released_from_the_oldest(harness: StoreHarness) -> None:
    """Five times 60,000 sums are more than a script may try while all other calls wait."""
    await harness.start()
    number = await harness.env(group_size=60_000)
    pieces = [scored(size, number) for size in (40_000, 31_000, 32_000, 33_000)]
    assert await harness.submit(*pieces) == [40_000, 71_000, 103_000, 136_000]
    assert await harness.ready() == []
    assert await harness.submit(scored(29_000, number)) == [125_000]
    assert await harness.ready() == names(0), "31,000 and 29,000 are the group size, and were not tried"


async def test_sums_are_tried_up_to_their_limit(harness: StoreHarness) -> None:
    await harness.start()
    number = await harness.env(group_size=65_536)  # Four times as many sums are the limit.
    pieces = [scored(size, number) for size in (40_000, 33_000, 36_000, 32_536)]
    assert await harness.submit(*pieces) == [40_000, 73_000, 109_000, 76_000]
    assert await harness.ready() == names(1, 3)


async def test_sums_of_a_call_are_tried_up_to_their_limit(harness: StoreHarness) -> None:
    """Each environment's pieces cost ten times 65,536 sums, and a call may try 64 times as many."""
    await harness.start()
    numbers = [await harness.env(group_size=65_536, name=f"e{index}") for index in range(7)]
    await harness.submit(*(scored(size, number) for number in numbers for size in (40_000, 33_000, 36_000, 32_536)))
    assert await harness.ready() == names(*(row for row in range(6 * 4) if row % 2 == 1))


def summing(sizes: Sequence[int], target: int) -> set[int] | None:
    """Returns indices. If the first groups that fit sum to the target, it returns those. Otherwise it returns any
    groups that do, with the last group as early as possible, then the group before it, and so on."""
    greedy, total = set(), 0
    for index, size in enumerate(sizes):
        if total + size <= target:
            greedy.add(index)
            total += size
            if total == target:
                return greedy

    def reach(count: int, left: int) -> bool:
        return left == 0 or (
            count > 0
            and (reach(count - 1, left) or (sizes[count - 1] <= left and reach(count - 1, left - sizes[count - 1])))
        )

    if not reach(len(sizes), target):
        return None
    chosen, left = set(), target
    for index in reversed(range(len(sizes))):
        if sizes[index] <= left and reach(index, left - sizes[index]):
            chosen.add(index)
            left -= sizes[index]
    return chosen


@pytest.mark.timeout(300)
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(target=st.integers(4, 13), sizes=st.lists(st.integers(1, 12), min_size=1, max_size=14))
def test_pieces_are_released_as_the_model_says(redis_url: str, target: int, sizes: list[int]) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    asyncio.run(_compare(redis_url, target, sizes))


async def _compare(url: str, target: int, sizes: list[int]) -> None:
    async with Redis.from_url(url) as client:
        harness = StoreHarness(client)
        await harness.start()
        number = await harness.env(group_size=target)
        queued: list[str] = []
        held: list[tuple[str, int]] = []
        for row, size in enumerate(sizes):
            (name,) = names(row)
            if size >= target:
                queued.append(name)
                expected = None
            else:
                held.append((name, size))
                chosen = summing([piece for _, piece in held], target) or set()
                queued += [held[index][0] for index in sorted(chosen)]
                held = [piece for index, piece in enumerate(held) if index not in chosen]
                expected = sum(piece for _, piece in held)
            assert await harness.submit(scored(size, number)) == [expected]
            assert await harness.ready() == queued
