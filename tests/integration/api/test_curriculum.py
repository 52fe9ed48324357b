"""Rows that rest because their last groups were too easy or too hard: which numbers become permits."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis
from tests.integration.api.store_harness import PREFIX, RUN, StoreHarness, submission, trainer
from tests.support.errors import raises
from tests.support.grids import rest_is_long
from tests.support.groups import make_group
from tests.support.redis_server import RedisServer

from gristmill import ApiError, Client, PolicyVersion, RowResult
from gristmill_api.errors import ApiProblem
from gristmill_api.settings import Limits
from gristmill_api.store import Store
from gristmill_api.store.connection import connect

BAND = (0.25, 0.75)
KNOWN_ROWS = 131_072


def result(row: int | str, reward: float, *turns: int, groups: int = 1) -> RowResult:
    return RowResult(row=str(row), reward=reward, band=BAND, groups=groups, turns=list(turns))


async def finish(
    harness: StoreHarness, number: int, found: RowResult, *, holder: str = "env-1", drop: bool = False
) -> bool:
    group_id = f"g{number:08d}"
    if drop:
        return await harness.store.permits.return_permit(RUN, holder, group_id, "same_scores", found)
    facts = submission(group_id, env_id=holder, incarnation=await harness.published())
    return await harness.store.queue.submit(RUN, holder, dataclasses.replace(facts, result=found))


async def ask(harness: StoreHarness, count: int, holder: str = "env-1") -> list[int]:
    return [int(group_id[1:]) for group_id in await harness.ask(holder, count)]


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize(
    ("reward", "place"),
    [(0.0, "below"), (0.2499, "below"), (0.25, "within"), (0.75, "within"), (0.7501, "above"), (1.0, "above")],
)
async def test_row_outside_of_the_band_rests_at_its_next_turns(
    harness: StoreHarness, reward: float, place: str, drop: bool
) -> None:
    await harness.start(groups=20)
    assert await ask(harness, 4) == [0, 1, 2, 3]
    await finish(harness, 1, result(1, reward, 3, 5, 6, 9), drop=drop)
    expected = [4, 5, 6, 7, 8, 9, 10] if place == "within" else [4, 7, 8, 10, 11, 12, 13]
    assert await ask(harness, 7) == expected
    status = await harness.store.runs.status(RUN)
    assert status.rows == {place: 1}
    assert status.rows_passed_over == expected[-1] - 10
    assert status.rows_issued == 11


async def test_number_whose_permit_comes_back_is_issued_again_also_if_its_row_rests_by_now(
    harness: StoreHarness,
) -> None:
    await harness.start(groups=20)
    assert await ask(harness, 3) == [0, 1, 2]
    await finish(harness, 0, result(0, 0.0, 2, 3))
    await harness.store.permits.return_permit(RUN, "env-1", "g00000002", "abandoned")
    assert await ask(harness, 2, "env-2") == [2, 4]


async def test_row_rests_once_the_mean_of_enough_groups_leaves_the_band(harness: StoreHarness) -> None:
    await harness.start(groups=60)
    await ask(harness, 6)
    for number, reward in enumerate([1.0, 0.4, 1.0, 0.6]):  # means of two: -, 0.7, 0.7, 0.8
        await finish(harness, number, result("sums/7", reward, 10 + number, groups=2))
    assert (await harness.store.runs.status(RUN)).rows == {"within": 0, "above": 1}
    assert await ask(harness, 9) == [6, 7, 8, 9, 10, 11, 12, 14, 15], "of the turns, only the last group's is left out"
    await finish(harness, 4, result("sums/7", 0.2, 20, groups=2))
    assert (await harness.store.runs.status(RUN)).rows == {"within": 1, "above": 0}, "0.6 and 0.2: within again"
    stored = await harness.redis.hgetall(PREFIX + "difficulty")
    assert stored == {b"sums/7": b"5 within 0.2 0.6"}


async def test_row_that_is_within_again_does_not_rest(harness: StoreHarness) -> None:
    """Two groups of a row may be in work at once, if the data set is small."""
    await harness.start(groups=20)
    await ask(harness, 3)
    await finish(harness, 0, result(0, 1.0, 2, 4, 6))
    await finish(harness, 2, result(0, 0.5, 4, 6, 8))
    assert (await harness.store.runs.status(RUN)).rows == {"above": 0, "within": 1}
    assert await ask(harness, 5) == [3, 4, 5, 6, 7]


async def test_mean_at_the_edge_of_the_band_is_within_it(harness: StoreHarness) -> None:
    """The sums of three floats are not exact: 0.7 + 0.7 + 0.7 is below 2.1, and 0.1 + 0.1 + 0.1 above 0.3."""
    await harness.start(groups=20)
    await ask(harness, 6)
    for number in range(3):
        low = RowResult(row="low", reward=0.7, band=(0.7, 1), groups=3, turns=[9])
        high = RowResult(row="high", reward=0.1, band=(0, 0.1), groups=3, turns=[9])
        await finish(harness, 2 * number, low)
        await finish(harness, 2 * number + 1, high)
    assert (await harness.store.runs.status(RUN)).rows == {"within": 2}


async def test_repeated_calls_count_a_group_once(harness: StoreHarness) -> None:
    await harness.start(groups=20)
    await ask(harness, 2)
    for _ in range(3):
        await finish(harness, 0, result(0, 0.0, 5, groups=2))
        await finish(harness, 1, result(1, 0.0, 6, groups=2), drop=True)
    assert await harness.redis.hgetall(PREFIX + "difficulty") == {b"0": b"1 within 0", b"1": b"1 within 0"}


async def test_refused_and_abandoned_groups_do_not_count(harness: StoreHarness) -> None:
    await harness.start(groups=20)
    await ask(harness, 3)
    with raises(ApiProblem, "permit_lost"):
        await finish(harness, 0, result(0, 0.0, 5), holder="env-2")
    await harness.store.permits.return_permit(RUN, "env-1", "g00000001", "abandoned", result(1, 0.0, 6))
    assert await harness.redis.exists(PREFIX + "difficulty", PREFIX + "resting") == 0


async def test_all_rows_may_rest_and_the_first_whose_rest_ends_is_next(harness: StoreHarness) -> None:
    """Four rows in plain order: row r has the turns r, r + 4, r + 8 and so on."""
    await harness.start(groups=40)
    await ask(harness, 4)
    for row, rest in enumerate([3, 2, 3, 2]):
        await finish(harness, row, result(row, 1.0, *(row + 4 * epoch for epoch in range(1, rest + 1))))
    assert await ask(harness, 5) == [13, 15, 16, 17, 18]


async def test_bitmap_is_searched_across_its_bytes_and_beyond_its_end(harness: StoreHarness) -> None:
    await harness.start(groups=400)
    await ask(harness, 3)
    await finish(harness, 0, result(0, 1.0, *range(3, 64)))
    assert await ask(harness, 2) == [64, 65], "the bitmap ends with the turn 63"
    await finish(harness, 1, result(1, 1.0, *range(66, 130)))
    assert await ask(harness, 2) == [130, 131]
    await finish(harness, 2, result(2, 1.0, 200))
    assert (await ask(harness, 70))[-2:] == [201, 202]


async def test_turn_far_ahead_takes_no_memory(harness: StoreHarness) -> None:
    await harness.start(groups=20)
    await ask(harness, 1)
    await finish(harness, 0, result(0, 1.0, 2**53, 2**26 + 1, 3))
    assert await harness.redis.strlen(PREFIX + "resting") == 1
    assert await ask(harness, 3) == [1, 2, 4]


async def test_rows_beyond_the_most_that_are_known_do_not_rest(harness: StoreHarness) -> None:
    await harness.start(groups=20)
    await ask(harness, 3)
    known: dict[Any, Any] = {f"old/{number}": "1 within 0.5" for number in range(KNOWN_ROWS - 1)}
    await harness.redis.hset(PREFIX + "difficulty", mapping=known)
    await finish(harness, 0, result("a", 1.0, 4))
    await finish(harness, 1, result("b", 1.0, 5))
    await finish(harness, 2, result("a", 1.0, 6))
    assert await harness.redis.hlen(PREFIX + "difficulty") == KNOWN_ROWS
    assert await ask(harness, 3) == [3, 5, 7]


async def test_rows_of_a_run_stay_for_its_extension_until_its_deletion(harness: StoreHarness) -> None:
    incarnation = await harness.start(groups=1, steps=1)
    await ask(harness, 1)
    await finish(harness, 0, result(0, 1.0, 4))
    names = [PREFIX + "difficulty", PREFIX + "resting"]
    await harness.store.runs.record_version(RUN, incarnation, 1)
    await harness.store.runs.finish(RUN, incarnation)
    assert [await harness.redis.ttl(name) for name in names] == [-1, -1]
    await harness.store.runs.take(RUN, trainer(groups=1, steps=2), [])
    await harness.store.runs.close(RUN)
    await harness.store.runs.delete(RUN)
    assert await harness.redis.exists(*names) == 0


class Expected:
    """A second implementation: the numbers of new permits, from the results in the order in which they came."""

    def __init__(self) -> None:
        self.next = 0
        self.rewards: dict[str, list[float]] = defaultdict(list)
        self.resting: set[int] = set()

    def issue(self) -> int:
        while self.next in self.resting:
            self.next += 1
        self.next += 1
        return self.next - 1

    def finish(self, found: RowResult) -> None:
        self.rewards[found.row].append(found.reward)
        last = self.rewards[found.row][-found.groups :]
        mean = sum(last) / len(last)
        turns = {turn for turn in found.turns if turn >= self.next}
        if len(last) == found.groups and not found.band[0] - 1e-9 <= mean <= found.band[1] + 1e-9:
            self.resting |= turns
        else:
            self.resting -= turns


@pytest.fixture
async def killable() -> AsyncIterator[tuple[RedisServer, StoreHarness]]:
    with RedisServer() as server:
        async with connect(server.url, {}) as client:
            harness = StoreHarness(Store(client, Limits(permit_ttl_s=3600)), client)
            await harness.create()
            yield server, harness


@pytest.mark.slow
@pytest.mark.parametrize("seed", rest_is_long(*range(3)))
async def test_numbers_follow_from_the_results_alone_whatever_is_killed(
    killable: tuple[RedisServer, StoreHarness], seed: int
) -> None:
    """Two workers, of which one ends now and then, and a Redis that is killed. Twelve rows, reordered each epoch."""
    server, harness = killable
    await harness.start(groups=3000)
    random, expected, rows = Random(seed), Expected(), 12
    orders = [random.sample(range(rows), rows) for _ in range(400)]
    held: dict[str, set[int]] = {"env-1": set(), "env-2": set()}
    lost: set[int] = set()
    kills = 0

    async def take(holder: str, count: int) -> None:
        asked = sorted(lost)[:count]
        asked += [expected.issue() for _ in range(count - len(asked))]
        assert await ask(harness, count, holder) == asked
        lost.difference_update(asked)
        held[holder].update(asked)

    for _ in range(400):
        holder = random.choice(sorted(held))
        action = random.random()
        if action < 0.4:
            await take(holder, random.randint(1, 4))
        elif action < 0.9 and held[holder]:
            number = random.choice(sorted(held[holder]))
            row = orders[number // rows][number % rows]
            turns = [epoch * rows + orders[epoch].index(row) for epoch in range(number // rows + 1, number // rows + 4)]
            found = result(row, random.choice([0.0, 1.0] if row % 3 else [0.5, 1.0]), *turns, groups=2)
            assert await finish(harness, number, found, holder=holder, drop=random.random() < 0.5)
            expected.finish(found)
            held[holder].discard(number)
        elif action < 0.95:  # the process is killed, and its successor of the same name begins
            lost |= held[holder]
            assert await harness.store.permits.release_all(RUN, holder) == len(held[holder])
            held[holder].clear()
        else:
            server.restart()
            await harness.redis.connection_pool.disconnect()  # as the API reconnects
            kills += 1
    status = await harness.store.runs.status(RUN)
    assert kills > 0
    assert status.rows_passed_over == expected.next - status.rows_issued > 0
    assert sum(status.rows.values()) == len(expected.rewards) == rows


async def test_client_sends_results_with_groups_and_with_drops(client: Client, redis: Redis) -> None:
    await client.create_run(RUN, {"dataset": "d"}, 2)
    incarnation, _ = await client.take(RUN, trainer(groups=8), [])
    await client.record_version(RUN, PolicyVersion(incarnation, 0))
    for _ in range(2):
        (permit,) = (await client.permits(RUN, "env-1", 1, wait=0)).permits
        group = make_group(permit.group_id, RUN, env_id="env-1")
        if permit.row == 0:
            assert await client.submit(group, "env-1", result=result(0, 1.0, 2, 3))
        else:
            await client.return_permit(RUN, "env-1", permit.group_id, "same_scores", result=result("b/1", 0.5, 4))
    assert [permit.row for permit in (await client.permits(RUN, "env-1", 2, wait=0)).permits] == [4, 5]
    status = await client.status(RUN)
    assert (status.rows, status.rows_issued, status.rows_passed_over) == ({"within": 1, "above": 1}, 4, 2)


@pytest.mark.parametrize(
    "wrong",
    [
        "x",
        '{"row": "a b", "reward": 0, "band": [0, 1], "turns": []}',
        '{"row": "a", "reward": "NaN", "band": [0, 1], "turns": []}',
        '{"row": "a", "reward": 0, "band": [0], "turns": []}',
        '{"row": "a", "reward": 0, "band": [0, 1], "groups": 17, "turns": []}',
        '{"row": "a", "reward": 0, "band": [0, 1], "turns": [-1]}',
        f'{{"row": "a", "reward": 0, "band": [0, 1], "turns": {list(range(65))}}}',
        '{"row": "a", "reward": 0, "band": [0, 1], "turns": [], "more": 1}',
    ],
)
async def test_result_that_is_not_one_is_refused(client: Client, http: httpx.AsyncClient, wrong: str) -> None:
    await client.create_run(RUN, {"dataset": "d"}, 2)
    incarnation, _ = await client.take(RUN, trainer(groups=8), [])
    await client.record_version(RUN, PolicyVersion(incarnation, 0))
    (permit,) = (await client.permits(RUN, "env-1", 1, wait=0)).permits
    group = make_group(permit.group_id, RUN, env_id="env-1")
    answer = await http.put(
        f"/v1/runs/{RUN}/groups/{permit.group_id}",
        params={"holder": "env-1", "result": wrong},
        content=group.encode(),
        headers={"Content-Type": "application/vnd.gristmill.group.v1+msgpack"},
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "bad_request")
    with raises(ApiError, "bad_request"):
        await client._call(
            "POST",
            f"/v1/runs/{RUN}/permits/return",
            json={"holder": "env-1", "group_id": "g00000000", "reason": "x", "result": wrong},
        )
