"""Runs: opening, taking, publishing versions, ending and deleting them, and their counts."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeGuard

from redis.asyncio import Redis

from gristmill import GroupAudit, Protocol, RunRecord, RunStatus
from gristmill_api import errors
from gristmill_api.errors import ApiProblem
from gristmill_api.settings import MAX_NUMBER, Limits
from gristmill_api.store import keys
from gristmill_api.store.keys import milliseconds
from gristmill_api.store.records import canonical, pairs, run_record, run_status, text
from gristmill_api.store.scripts import Scripts

DEFAULT_STACK = "default"
DELETED_AT_ONCE: Final = 512
"""Groups, batches and similar items that one call of a script deletes, while other calls wait."""
MOST_RUNS: Final = 1000
"""Runs that the store holds, finished ones included."""
MOST_GROUPS_PER_STEP: Final = 65_536
"""Groups that one lease can ask for."""
MOST_UNTAKEN_RUNS: Final = 32
"""Runs that no trainer has taken. The oldest that no environment works on is deleted for a new run."""
TOMBSTONES_S: Final = 86_400.0
"""The tombstones of a run stay this long after its end, for late retries of submits and for audits."""
FENCE_S: Final = 7 * 86_400.0
"""A trainer that outlives its run by less is fenced off from the next run of the same id."""
SHORT_AUDIT: Final = 4096
"""Group ids. A longer audit is prepared on a thread."""

_REVISION: Final = ("state", "created_ms", "creation", "digest", "incarnation", "training_steps")
"""Fields of a record, of which one changes whenever its settings or its state change. A take raises `incarnation`."""


class Runs:
    def __init__(self, redis: Redis, scripts: Scripts, limits: Limits, *, archive: bool) -> None:
        """`archive`: acked groups stay until an archiver has written them."""
        self._redis = redis
        self._scripts = scripts
        self._limits = limits
        self._archive = "1" if archive else ""

    async def create(
        self,
        run_id: str,
        env: dict[str, Any],
        group_size: int,
        stack: str | None = DEFAULT_STACK,
        protocol: Protocol = Protocol.GRISTMILL,
    ) -> tuple[RunRecord, bool]:
        """Open a run, join it, or resume a suspended run. True: the run is new.

        A stack has one open run; without a stack any number may be open. The stack's open run is suspended, unless an
        environment of it is alive (409 run_open). Settings that differ from the run's are refused (409 config_differs)
        with two exceptions. More training steps extend the run. A run without a finished step and without a living
        environment is replaced. An environment's token neither replaces nor suspends a run with permits that are out,
        nor extends an open run with a living environment of another word (409 run_in_use).
        """
        settings = canonical(env)
        digest = hashlib.sha256(canonical({"env": env, "group_size": group_size}).encode()).hexdigest()
        compared: tuple[str, str] = ("", "")
        while True:
            reply = await self._scripts.call(
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
                self._archive,
                MOST_UNTAKEN_RUNS,
            )
            match reply:
                case ["DELETING"]:
                    await self._delete(run_id, "continue")
                case ["ARCHIVING", waiting]:
                    raise errors.replaced_later(run_id, int(waiting))
                case ["UNTAKEN", abandoned]:
                    with contextlib.suppress(ApiProblem):  # Another call deleted it.
                        await self._delete(text(abandoned), "abandoned")
                case ["WAITING"]:
                    raise errors.too_many(
                        "runs",
                        f"the store holds {MOST_UNTAKEN_RUNS} runs without a trainer, each with a living environment",
                        "Stop some of these environments.",
                    )
                case ["FULL"]:
                    raise errors.too_many(
                        "runs", f"the store holds {MOST_RUNS} runs", "Delete finished runs: DELETE /v1/runs/RUN."
                    )
                case ["BUSY", other, now, *alive]:
                    raise errors.run_open(run_id, text(other), stack or "", self._living(now, alive))
                case ["IN_USE", other, permits, left_ms]:
                    why = f"{int(permits)} permits are out"
                    raise errors.run_in_use(text(other), why, math.ceil(float(left_ms) / 1000))
                case ["WORKING", name, left_ms]:
                    why = f"environment {text(name)!r} of another process is alive"
                    raise errors.run_in_use(run_id, why, math.ceil(float(left_ms) / 1000))
                case ["DIFFERS", recorded, size, its_stack, its_protocol, its_digest, steps, is_started, now, *alive]:
                    old = {"group_size": int(size), "stack": text(its_stack) or None, "protocol": text(its_protocol)}
                    new = {"group_size": group_size, "stack": stack, "protocol": protocol.value}
                    was, living = json.loads(recorded), self._living(now, alive)
                    replaceable = old["protocol"] == new["protocol"] == Protocol.GRISTMILL and not is_started
                    if old == new and not errors.differences(was, env):
                        settings, digest = text(recorded), text(its_digest)  # Written otherwise, such as 1 as 1.0.
                    elif old == new and env_extends(was, env, steps and int(steps)):
                        compared = ("extend", text(its_digest))
                    elif replaceable and not living:
                        compared = ("replace", text(its_digest))
                    else:
                        blocking = living if replaceable else ()
                        raise errors.config_differs(run_id, "environment", {**was, **old}, {**env, **new}, blocking)
                case [status, fields, *_]:
                    return run_record(pairs(fields)), status == "CREATED"

    def _living(self, now: bytes, alive: Sequence[Any]) -> list[errors.LivingEnv]:
        """From a script's time and its {environment, deadline, ...}, in ms."""
        at = int(now)
        ttl_ms = milliseconds(self._limits.env_ttl_s)
        return [
            errors.LivingEnv(text(name), (ttl_ms - (int(until) - at)) / 1000, (int(until) - at) / 1000)
            for name, until in zip(alive[::2], alive[1::2], strict=True)
        ]

    async def record(self, run_id: str) -> RunRecord:
        fields: dict[bytes, bytes] = await self._redis.hgetall(keys.record(run_id))  # type: ignore[assignment]
        if not fields:
            raise errors.run_missing(run_id)
        return run_record({text(name): value for name, value in fields.items()})

    async def exists(self, run_id: str) -> bool:
        return bool(await self._redis.exists(keys.record(run_id)))

    async def was_deleted(self, run_id: str) -> bool:
        """Returns whether the store deleted a run of this id in the last FENCE_S, or is deleting it.

        A run that no trainer had taken counts for one hour.
        """
        return bool(await self._redis.exists(*keys.deletion(run_id)))

    async def all(self, offset: int = 0, limit: int = MOST_RUNS) -> list[RunRecord]:
        """Returns runs, oldest first. `offset`: if it is negative, it counts from the end."""
        ids: list[bytes] = await self._redis.zrange(keys.RUNS, offset, offset + limit - 1)  # type: ignore[assignment]
        async with self._redis.pipeline(transaction=False) as pipe:
            for run_id in ids:
                pipe.hgetall(keys.record(text(run_id)))
            found: list[dict[bytes, bytes]] = await pipe.execute()
        records = [{text(name): value for name, value in fields.items()} for fields in found]
        return [run_record(fields) for fields in records if fields]  # Others were deleted meanwhile.

    async def revisions(self) -> dict[str, str]:
        """Returns for each run a text that changes with its settings and its state. It does not read the settings."""
        ids: list[bytes] = await self._redis.zrange(keys.RUNS, 0, -1)  # type: ignore[assignment]
        async with self._redis.pipeline(transaction=False) as pipe:
            for run_id in ids:
                pipe.hmget(keys.record(text(run_id)), *_REVISION)
            fields: list[list[bytes | None]] = await pipe.execute()
        return {
            text(run_id): " ".join(map(text, values))
            for run_id, values in zip(ids, fields, strict=True)
            if values[0] is not None  # Others were deleted meanwhile.
        }

    async def finished(self, within_s: float) -> dict[str, int]:
        """Returns the runs that finished in the last seconds, with the time of the end in ms."""
        seconds, _ = await self._redis.time()
        entries: list[tuple[bytes, float]] = await self._redis.zrangebyscore(  # type: ignore[assignment]
            keys.FINISHED, int((seconds - within_s) * 1000), "+inf", withscores=True
        )
        return {text(run_id): int(at) for run_id, at in entries}

    async def open_run(self, stack: str = DEFAULT_STACK) -> RunRecord | None:
        """Returns the run that the stack works on."""
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
        settings, compared = canonical(trainer), ""
        while True:
            reply = await self._scripts.call(
                "take",
                run_id,
                settings,
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
            match reply:
                case ["DIFFERS", recorded]:
                    old = json.loads(recorded)
                    if not errors.differences(old, trainer):
                        settings = text(recorded)  # Written otherwise, such as 1 as 1.0.
                        continue
                    compared = text(recorded)
                    if not extends(old, trainer):
                        raise errors.config_differs(run_id, "trainer", old, trainer)
                case ["BUSY", other]:
                    raise errors.run_open(run_id, text(other), record.stack or "", ())
                case ["OTHER", its_creation]:
                    raise errors.other_creation(run_id, creation, text(its_creation))
                case ["FINISHED"]:
                    raise errors.finished(run_id)
                case [_, fields, *_]:
                    return run_record(pairs(fields))

    async def record_version(self, run_id: str, incarnation: int, step: int) -> RunRecord:
        """Record the policy version that the model server serves from now on."""
        status, detail = await self._scripts.call_as_trainer("version", run_id, incarnation, step)
        if status == "BACKWARDS":
            raise errors.version_backwards(run_id, step, int(detail))
        return run_record(pairs(detail))

    async def finish(self, run_id: str, incarnation: int) -> RunRecord:
        _, fields = await self._scripts.call_as_trainer("finish", run_id, incarnation, milliseconds(TOMBSTONES_S))
        return run_record(pairs(fields))

    async def close(self, run_id: str) -> RunRecord:
        """End the run for an operator, whatever trainer has it. The run's data stays; no process continues it."""
        _, fields = await self._scripts.call("finish", run_id, "", milliseconds(TOMBSTONES_S))
        return run_record(pairs(fields))

    async def delete(self, run_id: str) -> None:
        """Delete a finished run and all its data."""
        match await self._delete(run_id, "begin"):
            case ["OPEN"]:
                raise errors.run_not_finished(run_id)
            case ["ARCHIVING", waiting]:
                raise errors.archiving(run_id, int(waiting))

    async def _delete(self, run_id: str, what: Literal["begin", "continue", "abandoned"]) -> list[Any]:
        """Returns the last reply of delete.lua. A crash in between leaves a run that is missing, and in gm:deleting."""
        while True:
            reply = await self._scripts.call(
                "delete", run_id, DELETED_AT_ONCE, milliseconds(FENCE_S), what, self._archive
            )
            if reply[0] != "MORE":
                return reply

    async def delete_old(self, after_s: float) -> list[str]:
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
                await self.delete(run_id)
                deleted.append(run_id)
        return deleted

    async def status(self, run_id: str) -> RunStatus:
        """Returns the run's counts, at constant cost."""
        reply = await self._scripts.run("status", keys.prefix(run_id))
        if not reply:
            raise errors.run_missing(run_id)
        return run_status(reply)

    async def open_statuses(self) -> dict[str, RunStatus]:
        """Returns the status of every open run. The cost does not grow with finished runs."""
        ids = sorted(text(name) for name in await self._redis.smembers(keys.OPEN))
        replies = {run_id: await self._scripts.run("status", keys.prefix(run_id)) for run_id in ids}
        return {run_id: run_status(reply) for run_id, reply in replies.items() if reply}

    async def audit(self, run_id: str) -> GroupAudit:
        """Returns every group id by its state, at one instant. The cost grows with the run."""
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
        if sum(map(len, held)) <= SHORT_AUDIT:
            return _audit(*held)
        return await asyncio.to_thread(_audit, *held)


@dataclass(frozen=True)
class TrainerPlan:
    groups_per_step: int
    training_steps: int
    max_staleness: int

    @classmethod
    def read(cls, trainer: Mapping[str, Any], group_size: int) -> TrainerPlan:
        """From the trainer's half of a run record. batch_size counts sequences; a step takes batch_size x
        gradient_accumulation_steps of them, which must be whole groups. Raises ApiProblem (422 bad_config)."""
        batch_size = _integer(trainer, "batch_size", 1)
        accumulation = _integer(trainer, "gradient_accumulation_steps", 1)
        sequences = batch_size * accumulation
        if sequences % group_size:
            raise errors.bad_config(
                f"batch_size {batch_size} x gradient_accumulation_steps {accumulation} = {sequences} sequences a step, "
                f"which is not divisible by the run's group_size {group_size}."
            )
        groups = sequences // group_size
        if groups > MOST_GROUPS_PER_STEP:
            raise errors.bad_config(f"a step has {groups} groups; one lease has at most {MOST_GROUPS_PER_STEP}.")
        return cls(
            groups_per_step=groups,
            training_steps=_integer(trainer, "training_steps", 1),
            max_staleness=_integer(trainer, "max_staleness", 0),
        )


def extends(old: Mapping[str, Any], new: Mapping[str, Any], planned: int | None = None) -> bool:
    """Whether trainer settings are the old ones with more training steps. `planned`: the old ones if `old` has none."""
    before, after = old.get("training_steps", planned), new.get("training_steps")
    if not (_is_integer(before) and _is_integer(after) and after > before):
        return False
    return {**old, "training_steps": after} == dict(new)


def env_extends(old: Mapping[str, Any], new: Mapping[str, Any], planned: int | None) -> bool:
    """`extends`, for an environment's settings with the trainer's under the key `trainer`."""
    if {**old, "trainer": None} != {**new, "trainer": None}:
        return False
    blocks = [settings.get("trainer") or {} for settings in (old, new)]
    return all(isinstance(block, Mapping) for block in blocks) and extends(blocks[0], blocks[1], planned)


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(trainer: Mapping[str, Any], name: str, least: int) -> int:
    value = trainer.get(name)
    if not _is_integer(value) or not least <= value <= MAX_NUMBER:
        raise errors.bad_config(f"the trainer's {name} must be a whole number from {least} to 2^53, not {value!r}.")
    return value


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
