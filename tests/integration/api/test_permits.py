"""Permits: capacity, expiry, return."""

from __future__ import annotations

import pytest
from tests.integration.api.store_harness import PREFIX, RUN, StoreHarness, trainer
from tests.support.errors import raises

from gristmill import Protocol
from gristmill_api.errors import ApiProblem


async def test_no_permit_is_granted_before_the_trainers_first_version(harness: StoreHarness) -> None:
    assert await harness.ask("env-1", 4) == []
    incarnation = (await harness.store.runs.take(RUN, trainer(), [])).incarnation
    assert await harness.ask("env-1", 4) == []
    await harness.store.runs.record_version(RUN, incarnation, 0)
    grant = await harness.store.permits.grant(RUN, "env-1", 2)
    assert [(permit.group_id, permit.row) for permit in grant.permits] == [("g00000000", 0), ("g00000001", 1)]
    assert grant.version == "1.0"


@pytest.mark.parametrize("staleness", [0, 1, 3])
async def test_permit_capacity_follows_the_version_and_ends_with_the_training_steps(
    harness: StoreHarness, staleness: int
) -> None:
    steps, per_step = 3, 4
    incarnation = await harness.start(steps=steps, staleness=staleness, groups=per_step)
    issued = 0
    for step in range(steps + 2):
        await harness.store.runs.record_version(RUN, incarnation, step)
        ids = await harness.ask("env-1", 1000)
        issued += len(ids)
        assert issued == min(step + 1 + staleness, steps) * per_step
        for group_id in ids[::2]:  # an issued permit and a submitted group count the same
            await harness.submit("env-1", group_id)
        assert await harness.ask("env-2", 1) == []


async def test_expired_permit_goes_unchanged_to_another_environment(harness: StoreHarness) -> None:
    await harness.start()
    ids = await harness.ask("env-1", 4)
    await harness.expire_permits(ids[2])
    grant = await harness.store.permits.grant(RUN, "env-2", 4)
    assert [(permit.group_id, permit.row) for permit in grant.permits] == [(ids[2], 2)]
    assert (await harness.store.runs.status(RUN)).rows_issued == 4


async def test_renew_reports_lost_permits_and_revives_unheld_ones(harness: StoreHarness) -> None:
    await harness.start()
    a, b, c, d = await harness.ask("env-1", 4)
    await harness.expire_permits(a, b, c)
    assert await harness.ask("env-2", 1) == [a]  # this call finds b and c expired; they wait for a holder
    renewal = await harness.store.permits.renew(RUN, "env-1", [a, b])
    assert (renewal.renewed, renewal.lost) == (1, [a])
    assert await harness.ask("env-2", 4) == [c], "a permit that is not named is not renewed"
    assert (await harness.store.permits.renew(RUN, "env-1", None)).renewed == 2  # b and d
    assert await harness.submit("env-1", d)
    assert (await harness.store.permits.renew(RUN, "env-1", [b, d])).lost == [d]


async def test_permit_expires_if_its_grant_never_arrived(harness: StoreHarness, redis_url: str) -> None:
    """Renewal by name: the holder does not know of the other permit, whose answer never arrived."""
    await harness.start()
    known, unknown = await harness.ask("env-1", 2)
    await harness.expire_permits(known, unknown)
    await harness.store.permits.renew(RUN, "env-1", [known])
    assert (await harness.ask("env-1", 4))[0] == unknown


async def test_dropped_groups_free_their_capacity_and_are_recorded(harness: StoreHarness) -> None:
    await harness.start()
    ids = await harness.ask("env-1", 4)
    assert await harness.store.permits.return_permit(RUN, "env-1", ids[0], "same_scores")
    assert not await harness.store.permits.return_permit(RUN, "env-1", ids[0], "same_scores"), "a retry"
    await harness.store.permits.return_permit(RUN, "env-1", ids[1], "same_scores")
    await harness.store.permits.return_permit(RUN, "env-1", ids[2], "too_long")
    assert await harness.ask("env-1", 9) == ["g00000004", "g00000005", "g00000006"], "new rows, not the dropped ones"
    status = await harness.store.runs.status(RUN)
    assert status.dropped == {"same_scores": 2, "too_long": 1}
    assert (await harness.store.runs.audit(RUN)).dropped == {
        ids[0]: "same_scores",
        ids[1]: "same_scores",
        ids[2]: "too_long",
    }
    with raises(ApiProblem, "permit_lost") as refused:
        await harness.submit("env-1", ids[0])
    assert "(same_scores)" in refused.value.message


async def test_abandoned_permits_are_issued_again_before_any_new_row(harness: StoreHarness) -> None:
    await harness.start(staleness=1)
    ids = await harness.ask("env-1", 4)
    other = await harness.ask("env-2", 1)
    await harness.store.permits.return_permit(RUN, "env-1", ids[3], "abandoned")
    assert not await harness.store.permits.return_permit(RUN, "env-1", ids[3], "abandoned"), "a retry"
    assert await harness.store.permits.release_all(RUN, "env-1") == 3
    assert await harness.store.permits.release_all(RUN, "env-1") == 0
    assert await harness.ask("env-3", 5) == [*ids, "g00000005"]
    assert (await harness.store.permits.renew(RUN, "env-2", other)).renewed == 1, "other holders keep theirs"


async def test_only_the_holder_can_return_a_permit(harness: StoreHarness) -> None:
    await harness.start()
    held, submitted = await harness.ask("env-1", 2)
    await harness.submit("env-1", submitted)
    for reason in ("abandoned", "too_long"):
        with pytest.raises(ApiProblem) as refused:
            await harness.store.permits.return_permit(RUN, "env-2", held, reason)
        assert refused.value.code == "permit_lost"
        with pytest.raises(ApiProblem) as refused:
            await harness.store.permits.return_permit(RUN, "env-1", submitted, reason)
        assert refused.value.code == "conflict"
    assert await harness.whereabouts() == {"ready": [submitted], "outstanding": [held]}


async def test_returned_rows_are_issued_again_in_numeric_order(harness: StoreHarness) -> None:
    await harness.start()
    await harness.redis.hset(PREFIX + "counters", "rows", 9_999_998)
    ids = ["g09999998", "g09999999", "g10000000", "g10000001"]
    assert await harness.ask("env-1", 4) == ids
    await harness.store.permits.release_all(RUN, "env-1")
    assert await harness.ask("env-1", 4) == ids
    for group_id in ids:
        await harness.store.permits.return_permit(RUN, "env-1", group_id, "abandoned")
    assert await harness.ask("env-1", 4) == ids
    await harness.expire_permits(*ids)
    assert await harness.ask("env-2", 4) == ids


async def test_renew_without_ids_renews_all_permits_of_its_holder_only(harness: StoreHarness) -> None:
    await harness.start()
    mine, others = await harness.ask("env-1", 2), await harness.ask("env-2", 2)
    far = 5_000_000_000_000
    await harness.redis.zadd(PREFIX + "permits", dict.fromkeys(mine + others, far))
    assert (await harness.store.permits.renew(RUN, "env-1", None)).renewed == 2
    deadlines = await harness.redis.zmscore(PREFIX + "permits", mine + others)
    assert [deadline == far for deadline in deadlines] == [False, False, True, True]


async def test_row_dropped_while_unheld_is_not_issued_again(harness: StoreHarness) -> None:
    await harness.start()
    (group,) = await harness.ask("env-1", 1)
    await harness.store.permits.release_all(RUN, "env-1")
    assert await harness.store.permits.return_permit(RUN, "env-1", group, "too_long")
    assert group not in await harness.ask("env-1", 2)


async def test_permit_request_on_an_atropos_run_is_refused(harness: StoreHarness) -> None:
    await harness.store.runs.create("other", {}, 2, None, Protocol.ATROPOS)
    with pytest.raises(ApiProblem) as refused:
        await harness.store.permits.grant("other", "env-1", 1)
    assert refused.value.code == "no_permits"


async def dropped(harness: StoreHarness, groups: int) -> None:
    """Drops that many groups of env-1, as an environment does with groups whose scores are equal."""
    for _ in range(groups):
        (group_id,) = await harness.ask("env-1", 1)
        await harness.store.permits.return_permit(RUN, "env-1", group_id, "same_scores")


async def test_run_that_drops_groups_issues_permits_ahead_and_keeps_its_bound(harness: StoreHarness) -> None:
    """Otherwise one prompt at a time is generated when the last group of a step is missing."""
    await harness.start(staleness=0, groups=4)
    assert len(await harness.ask("env-0", 9)) == 4, "without drops, as many permits as groups"
    await harness.store.permits.release_all(RUN, "env-0")
    await dropped(harness, 9)
    for _ in range(3):
        (group_id,) = await harness.ask("env-1", 1)
        assert await harness.submit("env-1", group_id)
    ids = await harness.ask("env-1", 8)
    assert len(ids) == 4, "one group is missing, and three of four groups were dropped"
    assert await harness.submit("env-1", ids[0])
    with raises(ApiProblem, "permit_lost"):
        await harness.submit("env-1", ids[1])
    assert (await harness.store.runs.status(RUN)).accepted == 4
    assert (await harness.store.permits.renew(RUN, "env-1", ids[1:])).lost == ids[1:], "their work is given up"
    with raises(ApiProblem, "permit_lost"):
        await harness.submit("env-1", ids[2])
    assert await harness.ask("env-1", 8) == [], "the step has its groups"
    await harness.store.runs.record_version(RUN, 1, 1)
    assert (await harness.ask("env-1", 3)) == ids[1:], "the rows come back before any new row"


async def test_row_of_a_group_that_came_too_late_goes_to_the_next_that_asks(harness: StoreHarness) -> None:
    incarnation = await harness.start(staleness=0, groups=4)
    await dropped(harness, 9)
    first, late = (await harness.ask("env-1", 5))[:2]
    for group_id in (first, *await harness.ask("env-2", 3)):
        assert await harness.submit("env-1" if group_id == first else "env-2", group_id)
    with raises(ApiProblem, "permit_lost"):
        await harness.submit("env-1", late)
    await harness.store.runs.record_version(RUN, incarnation, 1)
    assert await harness.ask("env-3", 1) == [late], "env-1 does not renew its permits"


async def test_permits_wait_for_the_first_version_of_a_trainer_that_went_back(harness: StoreHarness) -> None:
    plan = {"staleness": 0, "groups": 2, "steps": 9}
    incarnation = await harness.start(**plan)
    for step in (1, 2, 3):
        await harness.fill(2)
        await harness.lease(incarnation, f"b{step}", 2)
        await harness.store.queue.ack(RUN, incarnation, [f"b{step}"])
        await harness.store.runs.record_version(RUN, incarnation, step)
    back = (await harness.store.runs.take(RUN, trainer(**plan), [], 1)).incarnation
    assert await harness.ask("env-1", 9) == [], "the recorded version is of a later step"
    await harness.store.runs.record_version(RUN, back, 1)
    assert len(await harness.ask("env-1", 9)) == 2


async def test_permits_ahead_end_when_no_more_groups_are_dropped(harness: StoreHarness) -> None:
    incarnation = await harness.start(staleness=0, groups=40, steps=9)
    await dropped(harness, 40)
    issued = []
    for step in range(6):
        ids = await harness.ask("env-1", 500)
        issued.append(len(ids))
        for group_id in ids[:40]:
            assert await harness.submit("env-1", group_id)
        await harness.store.permits.release_all(RUN, "env-1")
        await harness.store.runs.record_version(RUN, incarnation, step + 1)
    assert issued == sorted(issued, reverse=True)
    assert issued[0] > 60
    assert issued[-1] == 40
