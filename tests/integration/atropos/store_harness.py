"""A harness for store tests: register, submit groups of a size, draw."""

from __future__ import annotations

import itertools
import json
from typing import Any

from redis.asyncio import Redis

from gristmill_api.atropos.conversion import SubmittedGroup, convert
from gristmill_api.atropos.messages import RegisterEnv, Registration, Scored
from gristmill_api.atropos.queue import Queue, new_id
from gristmill_api.settings import Limits
from gristmill_api.store import Store, keys

RUN = "default"


class StoreHarness:
    def __init__(self, redis: Redis, limits: Limits) -> None:
        self.redis = redis
        self.store = Store(redis, limits)
        self.queue = Queue(self.store, limits, RUN)
        self._numbers = itertools.count()
        self.sizes: dict[int, int] = {}
        """Sequences of the submitted groups, by number."""

    async def register(self, batch_size: int) -> None:
        """Registers as a trainer, which then asks for its first batch."""
        await self.queue.register(
            Registration(
                wandb_group="",
                wandb_project="",
                batch_size=batch_size,
                max_token_len=512,
                checkpoint_dir="",
                save_checkpoint_interval=0,
                starting_step=0,
                num_steps=100,
            )
        )
        assert await self.draw() is None

    async def env(self, group_size: int, share: float | None = None) -> int:
        """Registers an environment. Returns its number."""
        body = RegisterEnv(
            max_token_length=512, desired_name="e", weight=1, group_size=group_size, min_batch_allocation=share
        )
        env = await self.queue.register_env(body)
        assert env is not None
        return env.number

    async def submit(self, size: int, env: int | None = None, receipt: str | None = None) -> int | None:
        """Stores a group of this many sequences. Returns the store's answer: None or the buffer's size."""
        number = next(self._numbers)
        self.sizes[number] = size
        (said,) = await self.queue.submit(receipt or new_id("receipt"), [scored(number, size, env)])
        return said

    async def fill(self, count: int, size: int, env: int | None = None) -> None:
        """Submits this many groups of a size, a hundred per call."""
        for start in range(0, count, 100):
            numbers = list(itertools.islice(self._numbers, min(100, count - start)))
            self.sizes |= dict.fromkeys(numbers, size)
            await self.queue.submit(new_id("receipt"), [scored(number, size, env) for number in numbers])

    async def lend(self, batch_id: str | None = None) -> tuple[str, list[int]] | None:
        """Returns the batch id and the numbers of the next batch, which then counts as being sent."""
        batch_id = batch_id or new_id("atropos")
        found = await self.queue.lease(batch_id)
        if found is None or not found.groups:
            return None
        texts = await self.queue.texts(batch_id, found.groups)
        return batch_id, [json.loads(text)["tokens"][0][0] for text in texts]

    async def silence(self, number: int) -> None:
        """Makes the environment look as if its last request had come in 1970."""
        assert await self.redis.zadd(keys.prefix(RUN) + "envs", {str(number): 1}, xx=True, ch=True)

    async def draw(self) -> list[int] | None:
        """Returns the numbers of the next batch's groups, after their delivery."""
        lent = await self.lend()
        if lent is None:
            return None
        assert await self.queue.ack(lent[0])
        return lent[1]

    async def draw_all(self) -> list[list[int]]:
        batches = []
        while (batch := await self.draw()) is not None:
            batches.append(batch)
        return batches

    async def step(self) -> int:
        trainer = await self.queue.trainer()
        assert trainer is not None
        return trainer.step

    async def kinds(self) -> dict[str, int]:
        found: Any = await self.redis.hgetall(f"gm:{{{RUN}}}:kinds")
        return {kind.decode(): int(count) for kind, count in found.items()}

    async def ready_by_kind(self) -> dict[str, int]:
        """Returns the same number, counted in the queue itself."""
        counts: dict[str, int] = {}
        ids: list[Any] = await self.redis.zrange(f"gm:{{{RUN}}}:ready", 0, -1)
        for name in ids:
            facts: Any = await self.redis.hmget(f"gm:{{{RUN}}}:group:{name.decode()}", "sequences", "env_id")
            kind = " ".join(fact.decode() for fact in facts)
            counts[kind] = counts.get(kind, 0) + 1
        return counts

    async def buffered(self, env: int) -> int:
        """Returns the pieces in the environment's buffer."""
        return int(await self.redis.llen(f"gm:{{{RUN}}}:atropos:buffer:{env}"))

    async def reasons(self) -> list[str]:
        """Returns why groups are dead."""
        return [letter.reason for letter in await self.store.dead_letters.all(RUN, 0, 100)]

    async def commands(self) -> int:
        """Returns how many commands Redis has run, including those inside scripts."""
        stats: dict[str, dict[str, int]] = await self.redis.info("commandstats")
        return sum(stat["calls"] for name, stat in stats.items() if name != "cmdstat_info")


def scored(number: int, size: int, env: int | None) -> SubmittedGroup:
    """Returns a group whose tokens are its number."""
    rows = [[number]] * size
    return convert(Scored(tokens=rows, masks=rows, scores=[0.0] * size, env_id=env))
