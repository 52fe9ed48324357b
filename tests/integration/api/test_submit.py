"""A submit is stored once, under a permit."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis
from tests.integration.api.store_harness import PREFIX, RUN, StoreHarness, submission, trainer
from tests.support.errors import raises
from tests.support.groups import make_group

from gristmill import GROUP_MEDIA_TYPE, ApiError, Client, PolicyVersion
from gristmill_api.access.permissions import rules
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
    gone = ("env-1", b"digest", 2, 10, "env-1", 0, 1 << 30, 1 << 30, 100, 100, "gm:{run-1}:sent:never")
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


LATE: dict[str, dict[str, object] | None] = {
    "POST /take": {"trainer": trainer()},
    "POST /version": {"incarnation": 1, "step": 0},
    "POST /permits": {"holder": "env-1"},
    "POST /permits/renew": {"holder": "env-1"},
    "POST /permits/return": {"holder": "env-1", "group_id": "g00000000", "reason": "same_scores"},
    "POST /permits/abandon": {"holder": "env-1"},
    "PUT /groups/g00000000?holder=env-1": None,
    "POST /lease": {"incarnation": 1, "batch_id": "b", "groups": 1},
    "POST /extend": {"incarnation": 1, "batch_ids": ["b"]},
    "POST /ack": {"incarnation": 1, "batch_ids": ["b"]},
    "POST /nack": {"incarnation": 1, "batch_ids": ["b"]},
    "POST /envs": {"env_id": "env-1"},
    "POST /envs/env-1/heartbeat": None,
    "DELETE /envs/env-1": None,
    "POST /claims": {"name": "a", "holder": "env-1", "ttl": 9},
    "POST /metrics": {"source": "env-1", "step": 0, "values": {"a": 1}},
    "POST /dead/replay": {},
    "POST /dead/purge": {},
    "POST /finish": {"incarnation": 1},
    "POST /close": None,
    "DELETE ": None,
}
"""Every call that writes to a run, with a body that the API accepts."""


async def test_late_calls_of_a_deleted_run_do_not_reach_the_next_run(client: Client, redis: Redis) -> None:
    written = {f"{method} {path.removeprefix('/v1/runs/{}')}" for method, path, need in rules()
               if path.startswith("/v1/runs/{}") and not need.reads}  # fmt: skip
    assert written == {re.sub("(envs|groups)/[^/?]+", r"\1/{}", call.partition("?")[0]) for call in LATE}
    old = await client.create_run(RUN, {"dataset": "old"}, 2)
    record = await client.create_run(RUN, {"dataset": "new"}, 2)
    await client.take(RUN, trainer(), [])
    await client.record_version(RUN, PolicyVersion(2, 0))
    await client.register_env(RUN, "env-1")
    held, back = (permit.group_id for permit in (await client.permits(RUN, "env-1", 2, 0)).permits)
    await client.return_permit(RUN, "env-1", back, "abandoned")
    before = {key: await redis.dump(key) for key in await redis.keys()}

    async with httpx.AsyncClient(base_url=client.url) as http:
        for call, body in LATE.items():
            method, _, path = call.partition(" ")
            named = path + ("&" if "?" in path else "?") + f"creation={old.creation}"
            for group_id in (held, back) if method == "PUT" else [""]:
                more: dict[str, Any] = {"json": body} if method == "POST" and body is not None else {}
                if group_id:
                    media_type = {"Content-Type": GROUP_MEDIA_TYPE}
                    more = {"content": make_group(group_id, RUN).encode(),
                            "headers": media_type}  # fmt: skip
                    named = named.replace("g00000000", group_id)
                answer = await http.request(method, f"/v1/runs/{RUN}{named}", **more)
                assert (answer.status_code, answer.json()["error"]["code"]) == (409, "other_creation"), call
        assert {key: await redis.dump(key) for key in await redis.keys()} == before
        wrong = await http.post(f"/v1/runs/{RUN}/permits/abandon?creation=no", json={"holder": "env-1"})
        assert wrong.status_code == 422
    assert await client.renew_permits(RUN, "env-1", [held], creation=record.creation) == []


async def test_only_the_holder_that_had_a_permit_last_gets_it_back(harness: StoreHarness) -> None:
    await harness.start()
    a, b, c, d = await harness.ask("env-1", 4)
    await harness.expire_permits(a, b)
    assert await harness.ask("env-2", 1) == [a]
    await harness.store.permits.return_permit(RUN, "env-1", c, "abandoned")
    renewal = await harness.store.permits.renew(RUN, "env-3", [a, b, c, d])
    assert (renewal.renewed, renewal.lost) == (0, [a, b, c, d])
    for group_id in (b, c):
        assert await refusal(harness, "env-3", group_id) == "permit_lost"
        with raises(ApiProblem, "permit_lost"):
            await harness.store.permits.return_permit(RUN, "env-3", group_id, "too_long")
    assert (await harness.store.permits.renew(RUN, "env-1", [b])).lost == []
    assert await harness.submit("env-1", c)
    await harness.store.runs.create("other", {}, 2)  # suspends the run
    await harness.store.runs.close("other")
    await harness.create()
    assert (await harness.store.permits.renew(RUN, "env-3", [b])).lost == [b]
    assert (await harness.store.permits.renew(RUN, "env-1", [b])).lost == []


async def test_submit_refuses_weights_that_were_never_published_and_the_name_of_another(client: Client) -> None:
    await client.create_run(RUN, {}, 2)
    for step in (3, 4, 5):  # a trainer that resumed from step 3
        incarnation = 1
        if step == 3:
            incarnation, _ = await client.take(RUN, trainer(steps=9, staleness=3), [])
        await client.record_version(RUN, PolicyVersion(incarnation, step))
    await client.take(RUN, trainer(steps=9, staleness=3), [])
    (permit,) = (await client.permits(RUN, "env-1", 1, 0)).permits
    for label in ("0.0", "1.2", "1.7", "1.999", "2.7", "3.4", "99.999", "999999999999999.0"):
        with raises(ApiError, "bad_group"):
            await client.submit(make_group(permit.group_id, RUN, version=label), "env-1")
    with raises(ApiError, "bad_group"):
        await client.submit(make_group(permit.group_id, RUN, version="1.5", env_id="env-2"), "env-1")
    # The trainer publishes weights before it records them.
    for label in ("1.3", "1.6", "2.4"):
        assert await client.submit(make_group(permit.group_id, RUN, version=label), "env-1"), label
        (permit,) = (await client.permits(RUN, "env-1", 1, 0)).permits
