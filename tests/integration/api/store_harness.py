"""A test harness for a run: the store's verbs in short form, and clocks that tests can run down."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from gristmill import PolicyVersion, RunRecord
from gristmill_api.store import LeaseSize, Store, Submission, keys

RUN = "run-1"
PREFIX = keys.prefix(RUN)


def trainer(steps: int = 10, staleness: int = 0, groups: int = 4, **more: Any) -> dict[str, Any]:
    """A trainer's half for groups of 2 sequences, with `groups` groups per step."""
    half = {"batch_size": 2 * groups, "gradient_accumulation_steps": 1, "training_steps": steps}
    return {**half, "max_staleness": staleness, **more}


def submission(
    group_id: str,
    content: str = "a",
    size: int = 100,
    *,
    tokens: int = 10,
    env_id: str = "env-1",
    step: int = 0,
    sequences: int = 2,
    incarnation: int = 1,
) -> Submission:
    """Returns a body that the store accepts unchanged, because only the API decodes groups."""
    body = f"{group_id}/{content}/".encode().ljust(size, b".")
    return Submission(
        group_id,
        body,
        hashlib.sha256(body).digest(),
        sequences=sequences,
        tokens=tokens,
        env_id=env_id,
        versions=[PolicyVersion(incarnation, step)],
    )


@dataclass
class StoreHarness:
    store: Store
    redis: Redis

    async def create(self) -> RunRecord:
        record, _ = await self.store.runs.create(RUN, {"dataset": "d"}, 2)
        return record

    async def start(self, **plan: Any) -> int:
        """A trainer takes the run and records version 0. Returns its incarnation."""
        incarnation = (await self.store.runs.take(RUN, trainer(**plan), [])).incarnation
        await self.store.runs.record_version(RUN, incarnation, 0)
        return incarnation

    async def ask(self, holder: str, count: int) -> list[str]:
        return [permit.group_id for permit in (await self.store.permits.grant(RUN, holder, count)).permits]

    async def submit(self, holder: str, group_id: str, content: str = "a", step: int = 0) -> bool:
        facts = submission(group_id, content, step=step, env_id=holder, incarnation=await self.published())
        return await self.store.queue.submit(RUN, holder, facts)

    async def published(self) -> int:
        """Returns the incarnation of the newest version."""
        return int(await self.redis.hget(PREFIX + "record", "version_incarnation") or 1)

    async def fill(self, count: int, holder: str = "env-1") -> list[str]:
        """Takes permits and submits their groups, in order."""
        ids = await self.ask(holder, count)
        assert len(ids) == count
        for group_id in ids:
            assert await self.submit(holder, group_id)
        return ids

    async def send(self, *kinds: tuple[str, int, int], sequences: int = 2) -> list[str]:
        """Submits groups of (environment, tokens, step), in order, each under a permit of its environment."""
        ids: list[str] = []
        for env_id, tokens, step in kinds:
            (group_id,) = await self.ask(env_id, 1)
            incarnation = await self.published()
            facts = submission(
                group_id, env_id=env_id, tokens=tokens, step=step, sequences=sequences, incarnation=incarnation
            )
            await self.store.queue.submit(RUN, env_id, facts)
            ids.append(group_id)
        return ids

    async def lease(self, incarnation: int, batch_id: str, groups: int) -> list[str] | None:
        batch = await self.store.queue.lease(RUN, incarnation, batch_id, LeaseSize("groups", groups))
        return [leased.group_id for leased in batch.groups] or None

    async def expire_permits(self, *group_ids: str) -> None:
        """Expires the named permits, as if their TTL had passed."""
        assert await self.redis.zadd(PREFIX + "permits", dict.fromkeys(group_ids, 1), xx=True, ch=True)

    async def expire_lease(self, batch_id: str) -> None:
        assert await self.redis.zadd(PREFIX + "leases", {batch_id: 1}, xx=True, ch=True)

    async def give_up(self, incarnation: int, *, groups: int = 1) -> None:
        """Expires the first groups' attempts three times, so that they have no attempt left."""
        for attempt in range(3):
            await self.lease(incarnation, f"give_up{attempt}", groups)
            await self.expire_lease(f"give_up{attempt}")
        where = await self.whereabouts()
        await self.lease(incarnation, "find", len(where.get("ready", [])) + len(where.get("leased", [])))

    async def whereabouts(self) -> dict[str, list[str]]:
        """Returns the group ids by state, and only the states that hold any."""
        audit = await self.store.runs.audit(RUN)
        states = {name: getattr(audit, name) for name in ("ready", "leased", "trained", "dead", "outstanding")}
        return {name: ids for name, ids in states.items() if ids}
