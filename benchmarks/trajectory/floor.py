"""The floor: clients SET and GET the same bytes directly in Redis and do nothing else. No API can be faster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from benchmarks.trajectory.clients import CLIENTS
from benchmarks.trajectory.doors import BATCH_GROUPS
from benchmarks.trajectory.payloads import Payload
from benchmarks.trajectory.rounds import Plan, Samples
from redis.asyncio import BlockingConnectionPool, Redis


def measure(redis_url: str, plan: Plan, payloads: Sequence[Payload], samples: Samples) -> None:
    """Measures one round: `plan.groups` SETs by CLIENTS clients, then MGETs with one batch each."""
    asyncio.run(_measure(redis_url, plan, [b"".join(payload.native("bench", 0)) for payload in payloads], samples))


async def _measure(redis_url: str, plan: Plan, bodies: Sequence[bytes], samples: Samples) -> None:
    pool = BlockingConnectionPool.from_url(redis_url, max_connections=CLIENTS)
    async with Redis.from_pool(pool) as redis:
        names = [f"floor:{index}" for index in range(plan.groups)]
        await asyncio.gather(*(redis.ping() for _ in range(CLIENTS)))  # make the connections

        async def client(index: int) -> None:
            for number in range(index, plan.groups, CLIENTS):
                await redis.set(names[number], bodies[number % len(bodies)])

        started = time.monotonic()
        await asyncio.gather(*(client(index) for index in range(CLIENTS)))
        samples.submits.append(plan.groups / (time.monotonic() - started))
        for draw in range(plan.draws):
            wanted = names[draw * BATCH_GROUPS % plan.groups :][:BATCH_GROUPS]
            before = time.monotonic()
            await redis.mget(wanted)
            samples.draws.append(time.monotonic() - before)
        await redis.delete(*names)
    await pool.disconnect()
