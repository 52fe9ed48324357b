"""A harness for Atropos' queue: its verbs in short form, over a real Redis."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from redis.asyncio import Redis

from gristmill_api.atropos.conversion import Stored, SubmittedGroup
from gristmill_api.atropos.messages import RegisterEnv, Registration
from gristmill_api.atropos.queue import Queue
from gristmill_api.settings import Limits
from gristmill_api.store import Store, keys

RUN = "atropos"
START = keys.prefix(RUN)


def registration(batch_size: int = 4, starting_step: int = 0) -> Registration:
    return Registration(
        wandb_group="g",
        wandb_project="p",
        batch_size=batch_size,
        max_token_len=64,
        checkpoint_dir="d",
        save_checkpoint_interval=0,
        starting_step=starting_step,
        num_steps=10,
    )


@dataclass(frozen=True)
class AnyGroup:
    """A group with any bytes for its body, because the scripts never read the body."""

    sequences: int
    env_id: int | None
    body: bytes
    left_out: tuple[str, ...] = ()
    unusable: str = ""

    @property
    def tokens(self) -> int:
        return 10 * self.sequences

    def stored(self, run_id: str, version: str) -> Stored:
        body = version.encode().ljust(4) + bytes(13) + self.body[17:]
        return Stored(body, 4, 13)


def scored(
    sequences: int = 2,
    env_id: int | None = None,
    body: bytes = b"x" * 100,
    left_out: tuple[str, ...] = (),
    unusable: str = "",
) -> SubmittedGroup:
    return cast(SubmittedGroup, AnyGroup(sequences, env_id, body, left_out, unusable))


def as_stored(row: int, body: bytes, version: str = "0.0") -> bytes:
    """Returns the bytes that the store has of a group: the version, the id and the row in the places of `AnyGroup`."""
    return version.encode().ljust(4) + f"a{row:08d}".encode() + row.to_bytes(4, "big") + body[17:]


@dataclass
class StoreHarness:
    redis: Redis
    limits: Limits = field(default_factory=Limits)
    archive: bool = False
    _receipts: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.store = Store(self.redis, self.limits, archive=self.archive)
        self.queue = Queue(self.store, self.limits, RUN)

    async def start(self, batch_size: int = 4) -> None:
        """A trainer registers and asks for a batch, so that environments may register."""
        await self.queue.register(registration(batch_size))
        assert await self.lend("first") is None

    async def env(self, group_size: int = 1, share: float | None = None, name: str = "e") -> int:
        facts = RegisterEnv(
            max_token_length=64, desired_name=name, weight=1.0, group_size=group_size, min_batch_allocation=share
        )
        registered = await self.queue.register_env(facts)
        assert registered is not None
        return registered.number

    async def submit(self, *groups: SubmittedGroup) -> list[int | None]:
        return await self.queue.submit(f"receipt-{next(self._receipts)}", groups)

    async def lend(self, batch_id: str) -> list[str] | None:
        batch = await self.queue.lease(batch_id)
        assert batch is not None, "no trainer is registered"
        return [group.group_id for group in batch.groups] or None

    async def ready(self) -> list[str]:
        return (await self.store.runs.audit(RUN)).ready

    async def expire_lease(self, batch_id: str) -> None:
        assert await self.redis.zadd(START + "leases", {batch_id: 1}, xx=True, ch=True)

    async def silence(self, number: int) -> None:
        """Makes the environment look as if its last request had come in 1970."""
        assert await self.redis.zadd(START + "envs", {str(number): 1}, xx=True, ch=True)


def names(*rows: int) -> Sequence[str]:
    return [f"a{row:08d}" for row in rows]


def event_fields(kind: str, **fields: object) -> dict[str, str]:
    """Returns an event as EventListener records it."""
    return {"kind": kind, **{name: str(value) for name, value in fields.items()}}
