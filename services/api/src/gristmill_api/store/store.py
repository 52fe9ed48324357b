"""The store: one class, one method a verb. State changes happen in the Lua script of the same name."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from redis.asyncio import Redis
from redis.exceptions import ConnectionError, NoPermissionError  # noqa: A004

from gristmill import GroupAudit, Permit, PermitGrant, Protocol, RunRecord, RunState, RunStatus
from gristmill_api import errors
from gristmill_api.errors import ApiProblem
from gristmill_api.http.body_limit import offload
from gristmill_api.settings import Limits
from gristmill_api.store import keys
from gristmill_api.store.archive import ArchiveQueue
from gristmill_api.store.calls import Calls
from gristmill_api.store.claims import Claims
from gristmill_api.store.dead import DeadLetters
from gristmill_api.store.envs import Environments
from gristmill_api.store.journal import Journal
from gristmill_api.store.records import canonical, pairs, run_record, run_status, text, version
from gristmill_api.store.scripts import Scripts
from gristmill_api.store.trainer import TrainerPlan, env_extends, extends

DEFAULT_STACK = "default"
DELETED_AT_ONCE: Final = 512
"""Groups, batches and the like that one call of a script deletes: other calls wait for it."""
MOST_RUNS: Final = 1000
"""Runs that the store holds, finished ones included."""
MOST_REASONS: Final = 64
"""Drop reasons per run that are counted by name."""
TOMBSTONES_S: Final = 86_400.0
"""After the end of a run, its tombstones stay for this long: late retries of submits and audits need them."""
FENCE_S: Final = 7 * 86_400.0
"""A trainer that outlives its run by less is fenced off from the next run of the same id."""
ID_BYTES = 16
"""Of a group id, about."""


@dataclass(frozen=True)
class Submission:
    """A group's bytes as received, and what the store keeps beside them."""

    group_id: str
    body: bytes
    digest: bytes
    """SHA-256 of the body when inflated, 32 raw bytes: a retry in the other encoding is the same group."""
    raw_bytes: int
    """Bytes of the body when inflated."""
    sequences: int
    tokens: int
    env_id: str
    step: int
    """Policy step of the oldest weights that sampled it."""


@dataclass(frozen=True)
class Renewal:
    renewed: int
    lost: list[str]
    """Ids of permits that were asked for and that the holder no longer has."""


@dataclass(frozen=True)
class Leased:
    """One group of a leased batch. Its payload is read apart: a batch may be large."""

    group_id: str
    size: int
    """Bytes as stored."""
    raw_size: int
    """Bytes when inflated."""
    schema: str
    """What the bytes are: "group" (GROUP_MEDIA_TYPE) or "atropos" (the JSON of a ScoredData)."""

    def sent_size(self, inflate: bool) -> int:
        """Bytes that an answer holds of it."""
        return self.raw_size if inflate else self.size


@dataclass(frozen=True)
class Batch:
    """Answer to a lease: the groups, none when too few were ready, and what was met on the way to them."""

    groups: list[Leased]
    dead: int
    """Groups set aside as dead letters by this call: delivered too often."""
    stale: int
    """Groups dropped by this call: sampled by weights older than the lease allows."""


@dataclass(frozen=True)
class Amount:
    """How much a lease asks for."""

    unit: Literal["groups", "sequences", "tokens"]
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


class Store:
    """All runs. Methods raise `errors.ApiProblem` for what the protocol forbids, redis.RedisError when Redis fails.

    A method that returned has its effect on disk when Redis runs with `appendfsync always`.
    """

    def __init__(self, redis: Redis, limits: Limits, *, archive: bool = False) -> None:
        """`archive`: acked groups stay until an archiver has written them."""
        self._redis = redis
        self._limits = limits
        self._archive = "1" if archive else ""
        self.scripts = Scripts(redis)
        self._sender = secrets.token_hex(8)
        self._sends = itertools.count()
        self._calls = Calls(self.scripts)
        self.envs = Environments(redis, self._calls, _ms(limits.env_ttl_s))
        self.claims = Claims(self._calls)
        self.dead = DeadLetters(redis, self._calls)
        self.journal = Journal(redis, self._calls)
        self.archive = ArchiveQueue(redis, self._calls)

    async def create_run(
        self,
        run_id: str,
        env: dict[str, Any],
        group_size: int,
        stack: str | None = DEFAULT_STACK,
        protocol: Protocol = Protocol.GRISTMILL,
    ) -> tuple[RunRecord, bool]:
        """Open a run, join it, or resume a suspended run. True: it is new.

        A stack has one open run; without a stack any number may be open. The stack's open run is suspended, unless an
        environment of it is alive (409 run_open). Settings that differ from the run's are refused (409 config_differs)
        with two exceptions: more training steps extend the run, and a run without a finished step and without a living
        environment is replaced.
        """
        settings = canonical(env)
        digest = hashlib.sha256(canonical({"env": env, "group_size": group_size}).encode()).hexdigest()
        compared: tuple[str, str] = ("", "")
        while True:
            status, *rest = await self._calls.run(
                "create",
                run_id,
                run_id,
                settings,
                digest,
                group_size,
                stack or "",
                protocol.value,
                secrets.token_hex(16),
                *compared,
                MOST_RUNS,
            )
            if status == "DELETING":
                await self._delete(run_id, "continue")
            elif status == "FULL":
                raise errors.too_many(
                    "runs", f"the store holds {MOST_RUNS} runs", "Delete finished runs: DELETE /v1/runs/RUN."
                )
            elif status == "BUSY":
                raise errors.run_open(run_id, text(rest[0]), stack or "", self._living(rest[1:]))
            elif status == "DIFFERS":
                old = {"group_size": int(rest[1]), "stack": text(rest[2]) or None, "protocol": text(rest[3])}
                new = {"group_size": group_size, "stack": stack, "protocol": protocol.value}
                was, known = json.loads(rest[0]), text(rest[4])
                finished_steps, living = bool(rest[6]), self._living(rest[7:])
                if old == new and env_extends(was, env, rest[5] and int(rest[5])):
                    compared = ("extend", known)
                elif old["protocol"] == new["protocol"] == Protocol.GRISTMILL and not finished_steps and not living:
                    compared = ("replace", known)
                else:
                    blocking = () if finished_steps else living
                    raise errors.config_differs(run_id, "environment", {**was, **old}, {**env, **new}, blocking)
            else:
                return run_record(pairs(rest[0])), status == "CREATED"

    def _living(self, reply: Sequence[Any]) -> list[errors.LivingEnv]:
        """From a script's {now, environment, deadline, ...}."""
        at, *envs = reply
        ttl_ms = _ms(self._limits.env_ttl_s)
        return [
            errors.LivingEnv(text(name), (ttl_ms - (int(until) - at)) / 1000, (int(until) - at) / 1000)
            for name, until in zip(envs[::2], envs[1::2], strict=True)
        ]

    async def record(self, run_id: str) -> RunRecord:
        fields = await self._fields(run_id)
        if not fields:
            raise errors.run_missing(run_id)
        return run_record(fields)

    async def exists(self, run_id: str) -> bool:
        return bool(await self._redis.exists(keys.record(run_id)))

    async def runs(self, offset: int = 0, limit: int = MOST_RUNS) -> list[RunRecord]:
        """Runs, oldest first."""
        ids: list[bytes] = await self._redis.zrange(keys.RUNS, offset, offset + limit - 1)  # type: ignore[assignment]
        async with self._redis.pipeline(transaction=False) as pipe:
            for run_id in ids:
                pipe.hgetall(keys.record(text(run_id)))
            found: list[dict[bytes, bytes]] = await pipe.execute()
        records = [{text(name): value for name, value in fields.items()} for fields in found]
        return [run_record(fields) for fields in records if fields]  # less those deleted meanwhile

    async def open_run(self, stack: str = DEFAULT_STACK) -> RunRecord | None:
        """The run that the stack works on."""
        run_id = await self._redis.hget(keys.STACKS, stack)
        return None if run_id is None else await self.record(text(run_id))

    async def take(
        self,
        run_id: str,
        trainer: dict[str, Any],
        covered: Sequence[str],
        step: int | None = None,
        creation: str | None = None,
        taker: str | None = None,
    ) -> RunRecord:
        """Make a new trainer incarnation the run's only one.

        `covered`: groups that the trainer's checkpoint was trained on. `step`: the checkpoint's step; permits become
        free for the steps after it. `creation`: the creation of the run in which the checkpoint was made. `taker`:
        identifies a repeated call. Raises ApiProblem (409 other_creation) if the creation is not this run's.
        """
        record = await self.record(run_id)
        plan = TrainerPlan.read(trainer, record.group_size)
        compared = ""
        while True:
            status, *rest = await self._calls.run(
                "take",
                run_id,
                canonical(trainer),
                plan.groups_per_step,
                plan.training_steps,
                plan.max_staleness,
                self._archive,
                compared,
                creation or "",
                "" if step is None else step,
                taker or "",
                *covered,
            )
            if status != "DIFFERS":
                break
            compared = text(rest[0])
            old = json.loads(compared)
            if not extends(old, trainer):
                raise errors.config_differs(run_id, "trainer", old, trainer)
        if status == "BUSY":
            raise errors.run_open(run_id, text(rest[0]), record.stack or "", self._living(rest[1:]))
        if status == "OTHER":
            raise errors.other_creation(run_id, creation, text(rest[0]))
        if status == "FINISHED":
            raise errors.finished(run_id)
        return run_record(pairs(rest[0]))

    async def record_version(self, run_id: str, incarnation: int, step: int) -> RunRecord:
        """Tell which policy version the model server serves from now on."""
        status, *rest = await self._calls.trainer("version", run_id, incarnation, step)
        if status == "BACKWARDS":
            raise errors.version_backwards(run_id, step, int(rest[0]))
        return run_record(pairs(rest[0]))

    async def finish(self, run_id: str, incarnation: int) -> RunRecord:
        _, *rest = await self._calls.trainer("finish", run_id, incarnation, _ms(TOMBSTONES_S))
        return run_record(pairs(rest[0]))

    async def close_run(self, run_id: str) -> RunRecord:
        """End the run whoever trains it: an operator's word. Nothing in it is lost; nobody goes on with it."""
        _, *rest = await self._calls.run("finish", run_id, "", _ms(TOMBSTONES_S))
        return run_record(pairs(rest[0]))

    async def delete_run(self, run_id: str) -> None:
        """Delete a finished run and all it holds."""
        status, *rest = await self._delete(run_id, "begin")
        if status == "OPEN":
            raise errors.run_not_finished(run_id)
        if status == "ARCHIVING":
            raise errors.archiving(run_id, int(rest[0]))

    async def _delete(self, run_id: str, what: Literal["begin", "continue"]) -> list[Any]:
        """The last reply of delete.lua. A crash in between leaves a run that is missing, and in gm:deleting."""
        while True:
            reply = await self._calls.run("delete", run_id, DELETED_AT_ONCE, _ms(FENCE_S), what)
            if reply[0] != "MORE":
                return reply

    async def index(self) -> None:
        """Enter runs of an older version of the API in the sets of open and finished runs."""
        ids: list[bytes] = await self._redis.zrange(keys.RUNS, 0, -1)  # type: ignore[assignment]
        for run_id in ids:
            with contextlib.suppress(ApiProblem):  # It was deleted meanwhile.
                await self._calls.run("index", text(run_id), text(run_id))

    async def delete_old_runs(self, after_s: float) -> list[str]:
        """Delete the runs that finished more than `after_s` seconds ago and have no group to archive, and continue
        deletions that were interrupted. `after_s` 0: only these. Returns the ids of the deleted runs."""
        deleted = []
        for run_id in await self._redis.smembers(keys.DELETING):
            await self._delete(text(run_id), "continue")
            deleted.append(text(run_id))
        if not after_s:
            return deleted
        seconds, _ = await self._redis.time()
        old: list[bytes] = await self._redis.zrangebyscore(keys.FINISHED, "-inf", int((seconds - after_s) * 1000))  # type: ignore[assignment]
        for run_id in map(text, old):
            with contextlib.suppress(ApiProblem):  # Groups of it wait to be archived, or another process was faster.
                await self.delete_run(run_id)
                deleted.append(run_id)
        return deleted

    async def permits(self, run_id: str, holder: str, count: int) -> PermitGrant:
        """Up to `count` permits, at once; none when the run's capacity is out with others."""
        status, *rest = await self._calls.run(
            "permits", run_id, holder, count, _ms(self._limits.permit_ttl_s), _ms(self._limits.env_ttl_s)
        )
        if status == "PROTOCOL":
            raise errors.no_permits(run_id)
        state, incarnation, step, creation, *ids = rest
        granted = [group_id.decode() for group_id in ids]
        return PermitGrant(
            permits=[Permit(group_id=group_id, row=row_of(group_id)) for group_id in granted],
            state=RunState(state.decode()),
            version=version(incarnation, step),
            creation=text(creation),
        )

    async def renew(self, run_id: str, holder: str, group_ids: Sequence[str] | None) -> Renewal:
        """Keep the named permits alive, or all of the holder's. Naming them lets one whose grant got lost expire."""
        which = "all" if group_ids is None else "named"
        _, renewed, *lost = await self._calls.run(
            "renew", run_id, holder, _ms(self._limits.permit_ttl_s), which, *(group_ids or ())
        )
        return Renewal(int(renewed), [group_id.decode() for group_id in lost])

    async def give_back(self, run_id: str, holder: str, group_id: str, reason: str) -> bool:
        """Return one permit: "abandoned" is issued again, any other reason drops the group. False: known already."""
        (status,) = await self._calls.run("return", run_id, holder, group_id, reason, MOST_REASONS)
        if status == "LOST":
            raise errors.permit_lost(run_id, group_id, f"{holder!r} does not hold it")
        if status == "SUBMITTED":
            raise errors.conflict(run_id, group_id, "was submitted already")
        return bool(status == "OK")

    async def abandon(self, run_id: str, holder: str) -> int:
        """Return all the holder's permits; they are issued again. How many they were."""
        _, count = await self._calls.run("abandon", run_id, holder)
        return int(count)

    async def submit(self, run_id: str, holder: str, group: Submission) -> bool:
        """Store a group under its permit. False: this very group is here already."""
        sent = keys.sent(run_id, f"{self._sender}:{next(self._sends)}")
        status, *rest = await self._calls.run_on(
            {sent: group.body},
            "submit",
            run_id,
            group.group_id,
            holder,
            group.digest,
            group.sequences,
            group.tokens,
            group.raw_bytes,
            group.env_id,
            group.step,
            self._limits.max_stored_bytes,
            self._limits.max_run_bytes,
            self._limits.max_run_groups,
            len(group.body),
            sent,
        )
        if status == "GONE":
            raise ConnectionError("the group's bytes went before they were stored.")
        if status == "OTHER":
            raise errors.conflict(run_id, group.group_id, "was submitted with other content")
        if status == "FINISHED":
            raise errors.finished(run_id)
        if status == "LOST":
            raise errors.permit_lost(run_id, group.group_id, "it expired and went to another holder")
        if status == "DROPPED":
            raise errors.permit_lost(run_id, group.group_id, f"it was dropped ({rest[0].decode()})")
        if status == "UNKNOWN":
            raise errors.permit_lost(run_id, group.group_id, "none was ever issued")
        if status == "SIZE":
            raise errors.bad_group(
                group.group_id,
                f"it has {group.sequences} sequences, the run's group_size is {int(rest[0])}: as many, or at least 2",
            )
        if status == "FULL":
            raise errors.store_full(
                f"{int(rest[0])} bytes are stored; {len(group.body)} more would pass {self._limits.max_stored_bytes}."
            )
        if status == "RUN_FULL":
            raise errors.run_full(run_id, int(rest[0]), int(rest[1]))
        return bool(status == "STORED")

    async def lease(
        self,
        run_id: str,
        incarnation: int,
        batch_id: str,
        amount: Amount,
        *,
        max_staleness: int | None = None,
        partial: bool = False,
        look: bool = True,
    ) -> Batch:
        """Lease from the head of the queue, at once. The same id: the same batch.

        Groups or sequences: exactly so many. Tokens: what fits in the budget, in order, at least one group;
        `partial` takes what there is although more would fit. Groups sampled more than `max_staleness` steps ago
        are dropped, except if `look` is false and the queue holds less than the amount: then nothing is done.
        """
        status, *rest = await self._calls.trainer(
            "lease",
            run_id,
            incarnation,
            batch_id,
            amount.unit,
            amount.count,
            "1" if partial else "",
            "1" if look else "",
            _ms(self._limits.lease_ttl_s),
            self._limits.max_attempts,
            _ms(self._limits.env_ttl_s),
            "" if max_staleness is None else max_staleness,
        )
        if status == "ACKED":
            raise errors.batch_acked(run_id, batch_id)
        dead, stale, *groups = rest
        facts = zip(groups[::4], groups[1::4], groups[2::4], groups[3::4], strict=True)
        return Batch(
            [Leased(text(name), int(size), int(raw), text(schema)) for name, size, raw, schema in facts],
            int(dead),
            int(stale),
        )

    async def payload(self, run_id: str, group_id: str) -> bytes | None:
        """A stored group's bytes as received; None when it was trained meanwhile."""
        body = await self._redis.get(keys.payload(run_id, group_id))
        return None if body is None else bytes(body)  # type: ignore[arg-type]

    async def payloads(self, run_id: str, group_ids: Sequence[str]) -> list[bytes | None]:
        """`payload` of several groups, in one trip."""
        bodies = await self._redis.mget([keys.payload(run_id, group_id) for group_id in group_ids])
        return [None if body is None else bytes(body) for body in bodies]  # type: ignore[arg-type]

    async def adoptable(self, run_id: str, group_id: str) -> tuple[bytes | None, str]:
        """A stored group's bytes, None when it was trained meanwhile, and the policy version at its receipt."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.get(keys.payload(run_id, group_id))
            pipe.hget(keys.group(run_id, group_id), "version")
            body, label = await pipe.execute()
        return body, text(label)

    async def extend(self, run_id: str, incarnation: int, batch_ids: Sequence[str]) -> list[str]:
        """Keep leases alive. Returns the ids of those that are lost."""
        _, *lost = await self._calls.trainer("extend", run_id, incarnation, _ms(self._limits.lease_ttl_s), *batch_ids)
        return [batch_id.decode() for batch_id in lost]

    async def ack(self, run_id: str, incarnation: int, batch_ids: Sequence[str]) -> Acked:
        """A durable checkpoint covers these batches."""
        _, groups, batches, already, *lost = await self._calls.trainer(
            "ack", run_id, incarnation, self._archive, *batch_ids
        )
        return Acked(int(groups), int(batches), int(already), [batch_id.decode() for batch_id in lost])

    async def nack(self, run_id: str, incarnation: int, batch_ids: Sequence[str]) -> int:
        """Give batches back; their groups are ready in their places. How many groups that were."""
        _, groups = await self._calls.trainer("nack", run_id, incarnation, *batch_ids)
        return int(groups)

    async def status(self, run_id: str) -> RunStatus:
        """Counts; constant cost."""
        reply = await self.scripts.run("status", keys.prefix(run_id))
        if not reply:
            raise errors.run_missing(run_id)
        return run_status(reply)

    async def audit(self, run_id: str) -> GroupAudit:
        """Every group id by where it is, at one instant. Its cost grows with the run."""
        start = keys.prefix(run_id)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.exists(start + "record")
            pipe.hkeys(start + "trained")
            pipe.zrange(start + "ready", 0, -1)
            pipe.hkeys(start + "leased")
            pipe.zrange(start + "dead", 0, -1)
            pipe.hgetall(start + "dropped")
            pipe.zrange(start + "permits", 0, -1)
            exists, trained, ready, leased, dead, dropped, outstanding = await pipe.execute()
        if not exists:
            raise errors.run_missing(run_id)
        held = (trained, ready, leased, dead, dropped, outstanding)
        return await offload(ID_BYTES * sum(map(len, held)), _audit, *held)

    async def open_statuses(self) -> dict[str, RunStatus]:
        """The status of every open run. Its cost does not grow with the runs that are finished."""
        ids = sorted(text(name) for name in await self._redis.smembers(keys.OPEN))
        replies = {run_id: await self.scripts.run("status", keys.prefix(run_id)) for run_id in ids}
        return {run_id: run_status(reply) for run_id, reply in replies.items() if reply}

    async def redis_info(self) -> dict[str, Any]:
        """Redis' INFO, sections memory and persistence; empty if Redis does not allow INFO to this user."""
        try:
            return {**await self._redis.info("memory"), **await self._redis.info("persistence")}
        except NoPermissionError:
            return {}

    async def _fields(self, run_id: str) -> dict[str, bytes]:
        fields: dict[bytes, bytes] = await self._redis.hgetall(keys.record(run_id))  # type: ignore[assignment]
        return {name.decode(): value for name, value in fields.items()}

    async def ping(self) -> None:
        await self._redis.ping()


def _audit(
    trained: list[bytes],
    ready: list[bytes],
    leased: list[bytes],
    dead: list[bytes],
    dropped: dict[bytes, bytes],
    outstanding: list[bytes],
) -> GroupAudit:
    return GroupAudit(
        trained=sorted(map(text, trained)),
        ready=[text(name) for name in ready],
        leased=sorted(map(text, leased)),
        dead=[text(name) for name in dead],
        dropped={text(name): text(reason) for name, reason in dropped.items()},
        outstanding=sorted(map(text, outstanding)),
    )


def row_of(group_id: str) -> int:
    """The permit's row: "g00000012" is 12. Raises ValueError for an id that no permit has."""
    if not group_id.startswith("g") or not group_id[1:].isdecimal():
        raise ValueError(f"{group_id!r} is not a permit's group id such as 'g00000012'")
    return int(group_id[1:])


def _ms(seconds: float) -> int:
    return max(1, int(seconds * 1000))
