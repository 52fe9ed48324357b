"""Random groups sent to atroposlib's server and to ours: as long as its rule can pack all groups, both send the same
batches."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis
from tests.integration.atropos.store_harness import StoreHarness
from tests.support.atropos_reference import FRESH, AtroposReference
from tests.support.grids import rest_is_long

from gristmill_api.settings import Limits

BATCH = 16


@pytest.fixture(scope="module")
def reference() -> Iterator[httpx.Client]:
    with AtroposReference() as server, httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


def register(reference: httpx.Client, envs: list[tuple[int, float | None]]) -> None:
    reference.post(FRESH).raise_for_status()
    words = dict.fromkeys(("wandb_group", "wandb_project", "checkpoint_dir"), "")
    numbers = dict.fromkeys(("max_token_len", "save_checkpoint_interval", "starting_step", "num_steps"), 0)
    reference.post("/register", json={**words, **numbers, "batch_size": BATCH}).raise_for_status()
    reference.get("/batch").raise_for_status()
    for size, share in envs:
        env = {"max_token_length": 512, "desired_name": "e", "weight": 1, "group_size": size}
        reference.post("/register-env", json={**env, "min_batch_allocation": share}).raise_for_status()


def post(reference: httpx.Client, number: int, size: int, env: int | None) -> int | None:
    rows = [[number]] * size
    body = {"tokens": rows, "masks": rows, "scores": [0.0] * size, "env_id": env}
    answer: dict[str, Any] = reference.post("/scored_data", json=body).raise_for_status().json()
    return answer.get("buffer_size")


def draw_all(reference: httpx.Client) -> list[list[int]]:
    batches = []
    while (batch := reference.get("/batch").raise_for_status().json()["batch"]) is not None:
        batches.append([group["tokens"][0][0] for group in batch])
    return batches


@pytest.mark.parametrize("seed", rest_is_long(*range(20), first=4))
async def test_batches_equal_those_of_the_reference(reference: httpx.Client, redis: Redis, seed: int) -> None:
    rng = random.Random(seed)
    harness = StoreHarness(redis, Limits())
    shares = rng.random() < 0.6
    envs = [
        (rng.choice([1, 2, 4, 8]), rng.choice([None, 0.1, 0.25, 0.5, 0.9]) if shares else None)
        for _ in range(rng.randrange(1, 4))
    ]
    register(reference, envs)
    await harness.register(BATCH)
    for size, share in envs:
        await harness.env(size, share)
    # Groups without an environment never leave the reference while an environment has a share.
    nobody = [] if any(share is not None for _, share in envs) else [None]
    for number in range(60):
        env = rng.choice([*range(len(envs)), *nobody])
        largest = 8 if env is None else envs[env][0]
        size = rng.choice([size for size in (1, 2, 4, 8) if size <= largest])
        assert await harness.submit(size, env) == post(reference, number, size, env)
        if rng.random() < 0.5:
            # If several batches are ready at once, the reference sends the last one first.
            assert sorted(await harness.draw_all()) == sorted(draw_all(reference)), (seed, number)
