"""A store and an API over a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from redis.asyncio import Redis
from tests.integration.api.store_harness import StoreHarness
from tests.support.api_server import ApiServer
from tests.support.redis_server import RedisServer

from gristmill import Client
from gristmill_api.settings import Limits
from gristmill_api.store import Store
from gristmill_api.store.connection import connect


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    async with connect(redis_url, {}) as client:
        yield client


@pytest.fixture
async def harness(redis: Redis) -> StoreHarness:
    """An open run of groups of 2 sequences, without a trainer."""
    harness = StoreHarness(Store(redis, Limits(max_attempts=3)), redis)
    await harness.create()
    return harness


@pytest.fixture(scope="session")
def shared_api(shared_redis: RedisServer) -> Iterator[ApiServer]:
    with ApiServer(shared_redis.api_url, API_MAX_BODY_BYTES="200000", API_MAX_STORED_BYTES="20000") as server:
        yield server


@pytest.fixture
async def http(redis_url: str, shared_api: ApiServer) -> AsyncIterator[httpx.AsyncClient]:
    """Plain HTTP to the API over an empty Redis."""
    async with httpx.AsyncClient(base_url=shared_api.url, timeout=30) as client:
        yield client


@pytest.fixture
async def client(redis_url: str, shared_api: ApiServer) -> AsyncIterator[Client]:
    """The SDK's client to the API over an empty Redis."""
    async with Client(shared_api.url, patience=10) as client:
        yield client
