"""Claims: one of several processes gets a piece of work, until its claim expires."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from tests.integration.api.store_harness import PREFIX, RUN, StoreHarness
from tests.integration.api.test_archive import until
from tests.support.api_server import ApiServer

from gristmill import ApiError, Client
from gristmill_api.errors import ApiProblem
from gristmill_api.store.envs import MOST_CLAIMS

HOUR = 3_600_000


async def run_out(harness: StoreHarness, *names: str) -> None:
    await harness.redis.zadd(PREFIX + "claims", dict.fromkeys(names, 1), xx=True)


async def test_the_first_holder_gets_a_claim_and_can_renew_it(harness: StoreHarness) -> None:
    claims = harness.store.envs
    assert await claims.claim(RUN, "work", "a", HOUR) == "a"
    assert await claims.claim(RUN, "work", "b", HOUR) == "a"
    assert await claims.claim(RUN, "work", "a", HOUR) == "a", "the same holder again"
    assert await claims.claim(RUN, "other", "b", HOUR) == "b"


async def test_one_of_many_concurrent_holders_gets_a_claim(harness: StoreHarness) -> None:
    holders = [f"env-{number}" for number in range(20)]
    answers = await asyncio.gather(*(harness.store.envs.claim(RUN, "work", holder, HOUR) for holder in holders))
    assert len(set(answers)) == 1


async def test_an_expired_claim_goes_to_the_next_holder_that_asks(harness: StoreHarness) -> None:
    claims = harness.store.envs
    await claims.claim(RUN, "work", "a", HOUR)
    await run_out(harness, "work")
    assert await claims.claim(RUN, "work", "b", HOUR) == "b"
    assert await claims.claim(RUN, "work", "a", HOUR) == "b"


async def test_a_renewal_replaces_the_ttl_of_a_claim(harness: StoreHarness) -> None:
    claims = harness.store.envs
    for name, first, then in (("longer", 200, HOUR), ("shorter", HOUR, 200)):
        await claims.claim(RUN, name, "a", first)
        await claims.claim(RUN, name, "a", then)

    async def free() -> bool:
        return await claims.claim(RUN, "shorter", "b", HOUR) == "b"

    await until(free)
    assert await claims.claim(RUN, "longer", "b", HOUR) == "a", "it was claimed before, and would be free"


async def test_a_run_has_at_most_64_claims_and_expired_claims_do_not_count(harness: StoreHarness) -> None:
    claims = harness.store.envs
    names = [f"work-{number}" for number in range(MOST_CLAIMS)]
    for name in names:
        await claims.claim(RUN, name, "a", HOUR)
    with pytest.raises(ApiProblem) as refused:
        await claims.claim(RUN, "more", "a", HOUR)
    assert (refused.value.code, refused.value.status) == ("too_many_claims", 409)
    assert await claims.claim(RUN, names[0], "a", HOUR) == "a", "one that is held may be renewed"
    assert await claims.claim(RUN, names[0], "b", HOUR) == "a"
    await run_out(harness, *names[:3])
    for name in ("more", "and more", "a third"):
        assert await claims.claim(RUN, name, "b", HOUR) == "b"
    with pytest.raises(ApiProblem):
        await claims.claim(RUN, names[0], "b", HOUR)
    assert await harness.redis.hlen(PREFIX + "claimants") == await harness.redis.zcard(PREFIX + "claims") == MOST_CLAIMS


async def test_deleting_a_run_deletes_its_claims(harness: StoreHarness) -> None:
    await harness.store.envs.claim(RUN, "work", "a", HOUR)
    await harness.store.runs.close(RUN)
    assert await harness.store.envs.claim(RUN, "last", "a", HOUR) == "a", "a finished run may still be evaluated"
    await harness.store.runs.delete(RUN)
    assert await harness.redis.keys(PREFIX + "*") == [f"{PREFIX}fence".encode()]
    with pytest.raises(ApiProblem) as refused:
        await harness.store.envs.claim(RUN, "work", "a", HOUR)
    assert refused.value.code == "run_missing"


async def test_claims_over_http(redis_url: str, shared_api: ApiServer) -> None:
    async with Client(shared_api.url) as client:
        await client.create_run(RUN, {"dataset": "d"}, 2)
        assert await client.claim(RUN, "evaluation-0", "env-1", 60) == "env-1"
        assert await client.claim(RUN, "evaluation-0", "env-2", 60) == "env-1"
        with pytest.raises(ApiError) as error:
            await client.claim("nothing", "evaluation-0", "env-1", 60)
        assert error.value.code == "run_missing"
    async with httpx.AsyncClient(base_url=shared_api.url) as http:
        for wrong in ({"ttl": 0.5}, {"ttl": 3601}, {"name": "a b"}, {"holder": ""}, {"more": 1}, {"name": "report:1"}):
            body = {"name": "x", "holder": "y", "ttl": 60} | wrong
            answer = await http.post(f"/v1/runs/{RUN}/claims", json=body)
            assert answer.status_code == 422, wrong
