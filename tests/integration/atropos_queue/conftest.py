"""Atropos' queue over a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.integration.api.ear import Ear
from tests.integration.atropos_queue.bench import RUN, Bench

from gristmill_api.store.connection import connect


@pytest.fixture
async def bench(redis_url: str) -> AsyncIterator[Bench]:
    async with connect(redis_url, {}) as client:
        yield Bench(client)


@pytest.fixture
async def ear(bench: Bench) -> AsyncIterator[Ear]:
    ear = Ear(bench.redis, RUN)
    await ear.open()
    yield ear
    await ear.close()
