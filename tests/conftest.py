"""Fixtures that more than one service's tests use."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
import redis
from tests.support.redis_server import RedisServer

# On a developer's machine as in CI: the same examples each time, and no deadline for one, as machines are busy.
hypothesis.settings.register_profile("gristmill", derandomize=True, deadline=None)
hypothesis.settings.load_profile("gristmill")


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[RedisServer]:
    """One redis-server for the whole session. Tests that stop or kill theirs start one of their own."""
    with RedisServer() as server:
        yield server
        # What the client library and a check at the start try, and do without.
        dispensable = {"client|setinfo", "config|get"}
        assert server.refused() <= dispensable, "the API needs what scripts/redis_acl.py does not allow it"


@pytest.fixture
def redis_url(shared_redis: RedisServer) -> str:
    """URL of an empty Redis."""
    with redis.Redis.from_url(shared_redis.url) as client:
        client.flushall()
    return shared_redis.url
