"""The store for Atropos' clients: one run, over the scripts of store/lua."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from redis.exceptions import ConnectionError  # noqa: A004

from gristmill import Protocol
from gristmill_api import errors
from gristmill_api.atropos.conversion import NAME_BYTES, Stored, SubmittedGroup, to_json
from gristmill_api.atropos.env_status import EnvFacts, EnvView
from gristmill_api.atropos.messages import RegisterEnv, Registration
from gristmill_api.errors import ApiProblem
from gristmill_api.http.body_limit import offload
from gristmill_api.settings import Limits
from gristmill_api.store import Batch, LeasedGroup, Store, keys
from gristmill_api.store.keys import milliseconds
from gristmill_api.store.records import pairs, text

DELIVERY_TTL_S: Final = 30.0
"""If a process does not extend a batch that it sends for this long, the batch returns to the queue."""
_RECEIPT_TTL_MS: Final = 600_000
_RESET_CHUNK: Final = 256
WORK_OF_A_GROUP: Final = 16 * 1024
"""Bytes of a large group whose reading takes as long as the smallest group."""
_BYTES_PER_TOKEN: Final = 9
"""Of a group with log-probabilities."""
MOST_ENVS: Final = 16_384
"""Environments that register between two resets."""


@dataclass(frozen=True)
class Trainer:
    """The trainer's registration and step."""

    registration: dict[str, str]
    step: int
    queued: int
    """Ready groups."""


@dataclass(frozen=True)
class NewEnv:
    number: int
    namesakes: int
    """Environments that registered under its name before."""
    trainer: dict[str, str]
    """The registration, and `step`."""


class Queue:
    """One run, which opens with its first use. Methods raise the errors of Store."""

    def __init__(self, store: Store, limits: Limits, run_id: str) -> None:
        self.run_id: Final = run_id
        self._store = store
        self._limits = limits
        self._version = "0.0"
        """The weights that are served, as far as this process knows. The script that stores groups knows."""

    async def register(self, registration: Registration) -> None:
        """Register the trainer and its settings, unless a trainer is registered already."""
        fields = [item for name, value in registration.model_dump().items() for item in (name, str(value))]
        await self._write("atropos_register", registration.starting_step, *fields)

    async def register_env(self, env: RegisterEnv) -> NewEnv | None:
        """None: the trainer has not asked for a batch yet, and has not published its weights over /v1."""
        share = "" if env.min_batch_allocation is None else repr(env.min_batch_allocation)
        facts = env.max_token_length, repr(env.weight), env.group_size, share
        match await self._write("atropos_env", "register", env.desired_name, *facts, self._env_ttl_ms, MOST_ENVS):
            case ["OK", number, namesakes, trainer]:
                return NewEnv(number, namesakes, _texts(trainer))
            case ["ENVS"]:
                raise errors.too_many(
                    "envs", f"{MOST_ENVS} environments registered with run {self.run_id!r}", "Reset: GET /reset_data."
                )
        return None

    async def disconnect(self, number: int) -> bool:
        """False: the environment does not exist."""
        status, *_ = await self._run("atropos_env", "disconnect", number)
        return bool(status == "OK")

    async def trainer(self) -> Trainer | None:
        """None: no trainer registered since the last reset."""
        fields, queued = await self._store.queue.atropos_registration(self.run_id)
        if not fields:
            return None
        registration = {name.decode(): text(value) for name, value in fields.items()}
        return Trainer(registration, int(registration["step"]), queued)

    async def env(self, number: int) -> EnvView | None:
        """Returns the values for an environment's status. None: the environment does not exist."""
        status, *rest = await self._run("atropos_status_env", number, self._env_ttl_ms)
        if status != "OK":
            return None
        step, batch_size, context, weight, group_size, envs, kinds, finished = rest
        living = list(zip(envs[::4], envs[1::4], envs[2::4], envs[3::4], strict=True))
        return EnvView(
            number=number,
            step=int(step),
            batch_size=int(batch_size),
            group_size=int(group_size),
            own=EnvFacts(int(context), float(weight)),
            connected=[EnvFacts(int(context), float(weight)) for _, context, weight, _ in living],
            shares={text(name): float(share) for name, _, _, share in living if share},
            ready=[_kind(kind, count) for kind, count in zip(kinds[::2], kinds[1::2], strict=True)],
            finished=bool(finished),
        )

    async def submit(self, receipt: str, groups: Sequence[SubmittedGroup]) -> list[int | None]:
        """Store groups, all or none. For each None when it is in the queue, or how many sequences its environment's
        buffer holds now. `receipt`: the same again, after a lost answer, stores nothing and answers the same."""
        tokens = sum(group.tokens for group in groups)
        reply: list[Any] = ["VERSION", self._version]
        while reply[0] == "VERSION":
            self._version = version = text(reply[1])
            work = max(_BYTES_PER_TOKEN * tokens, WORK_OF_A_GROUP * len(groups))
            stored = await offload(work, _stored, groups, self.run_id, version)
            reply = await self._opened(functools.partial(self._send, receipt, groups, stored, version))
        match reply:
            case ["NAMES", names]:
                raise errors.too_many(
                    "groups", f"run {self.run_id!r} has stored {int(names)} groups", errors.OTHER_ATROPOS_RUN
                )
            case ["GONE"]:
                raise ConnectionError("the groups' bytes expired before they were stored.")
            case ["FULL", held]:
                raise errors.store_full(f"{int(held)} bytes are stored of {self._limits.max_stored_bytes}.")
            case ["RUN_FULL", held, count]:
                raise errors.run_full(self.run_id, int(held), int(count))
        _, sizes = reply
        return [None if size < 0 else size for size in sizes]

    async def _send(
        self, receipt: str, groups: Sequence[SubmittedGroup], stored: Sequence[Stored], version: str
    ) -> list[Any]:
        sent: dict[str, bytes] = {}
        facts: list[str | bytes | int] = []
        for index, (group, one) in enumerate(zip(groups, stored, strict=True)):
            key = keys.sent(self.run_id, f"{receipt}:{index}")
            sent[key] = one.body
            facts += (group.sequences, group.tokens, "" if group.env_id is None else group.env_id, key)
            facts += (",".join(group.left_out), group.unusable, one.name_at, one.row_at)
        limits = self._limits
        bounds = limits.max_stored_bytes, limits.max_run_bytes, limits.max_run_groups, sum(map(len, sent.values()))
        prefix = keys.prefix(self.run_id)
        status, *rest = await self._store.scripts.run(
            "atropos_submit", prefix, receipt, _RECEIPT_TTL_MS, *bounds, self._env_ttl_ms, version, NAME_BYTES, *facts,
            payloads=sent,
        )  # fmt: skip
        return [text(status), *rest]

    async def lease(self, batch_id: str) -> Batch | None:
        """The next batch; it has no groups while it is not full. None: no trainer is registered."""
        try:
            return await self._store.queue.lease_for_atropos(self.run_id, batch_id, DELIVERY_TTL_S)
        except ApiProblem as error:
            if error.code == "run_missing":
                return None
            raise

    async def extend(self, batch_id: str) -> bool:
        """Keep a batch that is being sent. False: it is lost."""
        return not await self._store.queue.extend(self.run_id, None, [batch_id], DELIVERY_TTL_S)

    async def ack(self, batch_id: str) -> bool:
        """Ack a batch that was sent whole. False: the lease had expired, and its groups may be in another batch."""
        return not (await self._store.queue.ack(self.run_id, None, [batch_id])).lost

    async def nack(self, batch_id: str) -> None:
        await self._store.queue.nack(self.run_id, None, [batch_id])

    async def texts(self, batch_id: str, groups: Sequence[LeasedGroup]) -> list[bytes]:
        """The groups as JSON. Raises ApiProblem (410) when one went to another lease and is trained."""
        if not groups:
            return []
        payloads = await self._store.queue.payloads(self.run_id, [group.group_id for group in groups])
        bodies = [body for body in payloads if body is not None]
        if len(bodies) < len(payloads):
            raise errors.lease_lost(self.run_id, [batch_id])
        return [await offload(len(body), to_json, body) for body in bodies]

    async def latest(self) -> bytes | None:
        """Returns the JSON of the group that was queued last, also after its training."""
        async for _, body in self._store.journal.examples(self.run_id, 1):
            return await offload(len(body), to_json, body)
        return None

    async def reset(self) -> None:
        """Forget the registrations and drop what is queued."""
        last: Any = ""
        remaining = 1
        while remaining:
            status, *rest = await self._run("atropos_reset", last, _RESET_CHUNK)
            if status == "MISSING":
                return
            last, remaining = rest

    @property
    def _env_ttl_ms(self) -> int:
        return milliseconds(self._limits.env_ttl_s)

    async def _run(self, script: str, *args: str | bytes | int) -> list[Any]:
        status, *rest = await self._store.scripts.run(script, keys.prefix(self.run_id), *args)
        return [text(status), *rest]

    async def _write(self, script: str, *args: str | bytes | int) -> list[Any]:
        return await self._opened(lambda: self._run(script, *args))

    async def _opened(self, write: Callable[[], Awaitable[list[Any]]]) -> list[Any]:
        """A script's reply. It needs the run, which is opened when it is not there."""
        reply = await write()
        if reply[0] == "MISSING":
            await self._store.runs.create(self.run_id, {}, 1, stack=None, protocol=Protocol.ATROPOS)
            reply = await write()
        if reply[0] == "FINISHED":
            raise errors.finished(self.run_id, errors.OTHER_ATROPOS_RUN)
        if reply[0] == "PROTOCOL":
            raise errors.not_atropos(self.run_id)
        return reply


def _stored(groups: Sequence[SubmittedGroup], run_id: str, version: str) -> list[Stored]:
    return [group.stored(run_id, version) for group in groups]


def new_id(kind: str) -> str:
    """Returns a unique batch id or receipt."""
    return f"{kind}:{uuid.uuid4().hex}"


def _kind(kind: bytes, count: bytes) -> tuple[str, int, int]:
    """From "<sequences> <env_id>"."""
    sequences, _, env_id = text(kind).partition(" ")
    return env_id, int(sequences), int(count)


def _texts(flat: Sequence[bytes]) -> dict[str, str]:
    return {name: text(value) for name, value in pairs(flat).items()}
