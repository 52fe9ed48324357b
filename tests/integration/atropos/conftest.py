"""The store as the root uses it, over a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis
from tests.integration.atropos.store_harness import StoreHarness
from tests.support.redis_server import RedisServer

from gristmill_api.settings import Limits
from gristmill_api.store.connection import connect


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    async with connect(redis_url, {}) as client:
        yield client


@pytest.fixture
def harness(redis: Redis) -> StoreHarness:
    """A run with which no trainer or environment has registered."""
    return StoreHarness(redis, Limits(max_attempts=3))


@pytest.fixture
async def lone_harness() -> AsyncIterator[StoreHarness]:
    """The same over a Redis that no other API uses, so that only the test adds to its count of commands."""
    with RedisServer() as server:
        async with connect(server.url, {}) as client:
            yield StoreHarness(client, Limits(max_attempts=3))
