"""Atropos' queue over a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.integration.api.event_listener import EventListener
from tests.integration.atropos_queue.store_harness import RUN, StoreHarness

from gristmill_api.store.connection import connect


@pytest.fixture
async def harness(redis_url: str) -> AsyncIterator[StoreHarness]:
    async with connect(redis_url, {}) as client:
        yield StoreHarness(client)


@pytest.fixture
async def listener(harness: StoreHarness) -> AsyncIterator[EventListener]:
    listener = EventListener(harness.redis, RUN)
    await listener.open()
    yield listener
    await listener.close()
