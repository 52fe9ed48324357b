"""Our API answers as atroposlib's own server does, except for the fixes. Every fix is documented, and every documented
fix is real."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import redis
from tests.integration.atropos.conversation import conversations, expand, fixes, say
from tests.support.api_server import ApiServer
from tests.support.atropos_reference import FRESH, AtroposReference
from tests.support.redis_server import RedisServer

from gristmill_api.store import keys

CONVERSATIONS = conversations()
ENVS = keys.prefix("default") + "envs"


@pytest.fixture(scope="module")
def reference() -> Iterator[httpx.Client]:
    with AtroposReference() as server, httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def ours(shared_redis: RedisServer) -> Iterator[httpx.Client]:
    with (
        ApiServer(shared_redis.api_url, API_MAX_BODY_BYTES="200000") as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        yield client


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=[each["about"] for each in CONVERSATIONS])
def test_answers_equal_the_reference_except_for_the_fixes(
    conversation: dict[str, Any], reference: httpx.Client, ours: httpx.Client, shared_redis: RedisServer
) -> None:
    reference.post(FRESH).raise_for_status()
    with redis.Redis.from_url(shared_redis.url) as client:
        client.flushall()
    for number, step in enumerate(conversation["steps"]):
        at = f"step {number}, {step.get('say')}"
        if "expire" in step:
            with redis.Redis.from_url(shared_redis.url) as client:
                names = client.zrange(ENVS, 0, -1)
                client.zadd(ENVS, dict.fromkeys(names, 1))
            continue
        theirs = [answer.shown() for answer in say(reference, step)]
        answers = say(ours, step)
        mine = [answer.shown() for answer in answers]
        if "fix" not in step:
            assert mine == theirs, f"{at}: no fix describes this difference"
            continue
        assert mine != theirs, f"{at}: fix {step['fix']!r} makes no difference any more"
        if "ours" in step:
            told = answers[0]
            assert told.status == step["ours"]["status"], at
            assert told.value == step["ours"].get("text", _told(step["ours"].get("json"))), at


def _told(value: Any) -> Any:
    value = expand(value)
    return {**value, "error": "a reason"} if isinstance(value, dict) and value.get("status") == "failure" else value


def test_conversations_use_exactly_the_fixes_of_the_table() -> None:
    used = {step["fix"] for each in CONVERSATIONS for step in each["steps"] if "fix" in step}
    assert used == set(fixes())


def test_every_fix_documents_both_behaviours_and_why_it_is_safe() -> None:
    for fix in fixes().values():
        assert set(fix) == {"id", "theirs", "ours", "safe"}, fix["id"]
        assert all(fix.values()), fix["id"]
