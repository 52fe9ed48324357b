"""The queue: groups are submitted to it, leased from it in submit order, and acked or nacked."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from redis.asyncio import Redis
from redis.exceptions import ConnectionError  # noqa: A004

from gristmill import PolicyVersion, RowResult
from gristmill_api import errors
from gristmill_api.settings import Limits
from gristmill_api.store import keys
from gristmill_api.store.keys import milliseconds
from gristmill_api.store.records import result_words, text
from gristmill_api.store.scripts import Scripts

_MOST_TRAINERS: Final = 64
"""Incarnations of the run's trainer whose weights sampled one group."""


@dataclass(frozen=True)
class Submission:
    """A group's bytes as received, and the facts that the store keeps with them."""

    group_id: str
    body: bytes
    digest: bytes
    """SHA-256 of the body, 32 raw bytes."""
    sequences: int
    """The branches of a rollout count as one sequence."""
    tokens: int
    env_id: str
    versions: Sequence[PolicyVersion]
    """The weights that sampled it, the oldest first."""
    result: RowResult | None = None
    """Of the group's row, in a run whose rows may rest."""


@dataclass(frozen=True)
class LeasedGroup:
    """One group of a leased batch. Its payload is read by another call, because a batch may be large."""

    group_id: str
    size: int


@dataclass(frozen=True)
class Batch:
    """The answer to a lease. The list is empty if too few groups were ready."""

    groups: list[LeasedGroup]
    dead: int
    """Groups that became dead letters by this call, because they were delivered too often, or no
    batch or trainer can take them."""


@dataclass(frozen=True)
class LeaseSize:
    """The size of the batch that a lease asks for."""

    unit: Literal["groups", "sequences"]
    count: int


@dataclass(frozen=True)
class Acked:
    groups: int
    """Groups that became trained by this call."""
    batches: int
    already: int
    """Batches that an earlier call had acked."""
    lost: list[str]
    """Batches of which a group went to another lease."""


class GroupQueue:
    def __init__(self, redis: Redis, scripts: Scripts, limits: Limits, *, archive: bool) -> None:
        """`archive`: acked groups stay until an archiver has written them."""
        self._redis = redis
        self._scripts = scripts
        self._limits = limits
        self._archive = "1" if archive else ""
        self._sender = secrets.token_hex(8)
        self._sends = itertools.count()

    async def submit(self, run_id: str, holder: str, group: Submission) -> bool:
        """Store a group under its permit. False: the store already holds this group with the same bytes."""
        sent = keys.sent(run_id, f"{self._sender}:{next(self._sends)}")
        ends: list[int] = []
        for incarnation, of_trainer in itertools.groupby(group.versions, lambda version: version.incarnation):
            steps = [version.step for version in of_trainer]
            ends += (incarnation, steps[0], steps[-1])
        if len(ends) > 3 * _MOST_TRAINERS:
            raise errors.bad_group(group.group_id, f"weights of more than {_MOST_TRAINERS} trainers sampled it")
        reply = await self._scripts.call(
            "submit",
            run_id,
            group.group_id,
            holder,
            group.digest,
            group.sequences,
            group.tokens,
            group.env_id,
            group.versions[0].step,
            self._limits.max_stored_bytes,
            self._limits.max_run_bytes,
            self._limits.max_run_groups,
            len(group.body),
            sent,
            result_words(group.result),
            *ends,
            payloads={sent: group.body},
        )
        match reply:
            case ["GONE"]:
                raise ConnectionError("the group's bytes expired before they were stored.")
            case ["OTHER"]:
                raise errors.conflict(run_id, group.group_id, "was submitted with other content")
            case ["FINISHED"]:
                raise errors.finished(run_id)
            case ["LOST"]:
                raise errors.permit_lost(run_id, group.group_id, "it expired and went to another holder")
            case ["DROPPED", reason]:
                raise errors.permit_lost(run_id, group.group_id, f"it was dropped ({text(reason)})")
            case ["UNKNOWN"]:
                raise errors.permit_lost(run_id, group.group_id, "none was ever issued to this holder")
            case ["SURPLUS"]:
                why = "the run has all groups of the step, so the row is issued again for the next one"
                raise errors.permit_lost(run_id, group.group_id, why)
            case ["SIZE", size]:
                raise errors.bad_group(
                    group.group_id,
                    f"it has {group.sequences} rollouts, the run's group_size is {int(size)}: as many, or at least 2",
                )
            case ["VERSION", trainer, step]:
                why = f"weights {text(trainer)}.{text(step)} sampled it, and the run never published them"
                raise errors.bad_group(group.group_id, why)
            case ["FULL", stored]:
                most = self._limits.max_stored_bytes
                raise errors.store_full(f"{int(stored)} bytes are stored; {len(group.body)} more would pass {most}.")
            case ["RUN_FULL", stored, groups]:
                raise errors.run_full(run_id, int(stored), int(groups))
        return bool(reply == ["STORED"])

    async def lease(self, run_id: str, incarnation: int, batch_id: str, amount: LeaseSize) -> Batch:
        """Lease exactly `amount` of groups or sequences from the queue, at once. The same id returns the same batch."""
        reply = await self._lease(run_id, incarnation, batch_id, amount.unit, amount.count, self._limits.lease_ttl_s)
        return _batch(reply)

    async def lease_for_atropos(self, run_id: str, batch_id: str, ttl_s: float) -> Batch | None:
        """Lease the next batch of Atropos' protocol: whole groups with exactly as many sequences as its trainer
        registered. The same id returns the same batch. None: no trainer of that protocol is registered."""
        reply = await self._lease(run_id, None, batch_id, "atropos", "", ttl_s)
        return None if reply == ["UNREGISTERED"] else _batch(reply)

    async def atropos_registration(self, run_id: str) -> tuple[dict[bytes, bytes], int]:
        """Returns what the trainer of Atropos' protocol registered, with its step, and how many groups are ready. The
        registration is empty if none is there."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hgetall(keys.prefix(run_id) + "atropos")
            pipe.zcard(keys.prefix(run_id) + "ready")
            fields, ready = await pipe.execute()
        return fields, ready

    async def _lease(
        self, run_id: str, incarnation: int | None, batch_id: str, unit: str, count: int | str, ttl_s: float
    ) -> list[Any]:
        all_dead = 0
        while True:
            reply = await self._scripts.call_as_trainer(
                "lease", run_id, incarnation, batch_id, unit, count, milliseconds(ttl_s), self._limits.max_attempts
            )
            match reply:
                case ["ACKED"]:
                    raise errors.batch_acked(run_id, batch_id)
                case ["UNREGISTERED"]:
                    return reply
                case [status, dead, *groups]:
                    all_dead += dead
                    # A call makes a bounded number of dead letters, because other calls wait meanwhile.
                    if status == "OK" or not dead:
                        return [status, all_dead, *groups]

    async def payload(self, run_id: str, group_id: str) -> bytes | None:
        """Returns a stored group's bytes; None if the group was trained meanwhile."""
        body = await self._redis.get(keys.payload(run_id, group_id))
        return None if body is None else bytes(body)  # type: ignore[arg-type]

    async def payloads(self, run_id: str, group_ids: Sequence[str]) -> list[bytes | None]:
        """Returns the `payload` of several groups, in one round trip."""
        bodies = await self._redis.mget([keys.payload(run_id, group_id) for group_id in group_ids])
        return [None if body is None else bytes(body) for body in bodies]  # type: ignore[arg-type]

    async def extend(
        self, run_id: str, incarnation: int | None, batch_ids: Sequence[str], ttl_s: float | None = None
    ) -> list[str]:
        """Keep leases alive, for API_LEASE_TTL_S or `ttl_s` seconds. Returns the ids of those that are lost."""
        ttl_ms = milliseconds(ttl_s or self._limits.lease_ttl_s)
        _, *lost = await self._scripts.call_as_trainer("extend", run_id, incarnation, ttl_ms, *batch_ids)
        return [batch_id.decode() for batch_id in lost]

    async def ack(self, run_id: str, incarnation: int | None, batch_ids: Sequence[str]) -> Acked:
        """Mark batches as covered by a durable checkpoint; without an incarnation as sent to Atropos' trainer."""
        _, groups, batches, already, *lost = await self._scripts.call_as_trainer(
            "ack", run_id, incarnation, self._archive, *batch_ids
        )
        return Acked(int(groups), int(batches), int(already), [batch_id.decode() for batch_id in lost])

    async def nack(self, run_id: str, incarnation: int | None, batch_ids: Sequence[str]) -> int:
        """Return batches. Their groups are ready again, in their places. Returns how many groups there were."""
        _, groups = await self._scripts.call_as_trainer("nack", run_id, incarnation, *batch_ids)
        return int(groups)


def _batch(reply: Sequence[Any]) -> Batch:
    """From the reply of lease.lua."""
    _, dead, *groups = reply
    leased = [LeasedGroup(text(name), int(size)) for name, size in zip(groups[::2], groups[1::2], strict=True)]
    return Batch(leased, int(dead))
