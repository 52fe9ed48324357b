"""The trajectory API's client."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import httpx
import msgspec

from gristmill import compression
from gristmill.errors import ApiError, ApiUnreachable, ConfigError
from gristmill.group import GROUP_MEDIA_TYPE, TrajectoryGroup
from gristmill.run import (
    AtroposRegistration,
    Claim,
    DeadLetter,
    GroupAudit,
    MetricsRow,
    PermitGrant,
    RunRecord,
    RunStatus,
)
from gristmill.version import PolicyVersion

_LOG = logging.getLogger(__name__)
_TRANSIENT = frozenset({429, 502, 503, 504})
_MAX_GROUP_BYTES = 1 << 30
# A generator of its own: the process' is in a trainer's checkpoints, and must not depend on retries.
_JITTER = random.Random()
_BATCH = msgspec.msgpack.Decoder(list[bytes])


class Client:
    """Async client. Every call may be repeated safely, so transient failures are retried for `patience` seconds.

    Transient: no connection, time-out, 429, 502, 503, 504. Any other error answer raises ApiError at
    once; an API that stays away raises ApiUnreachable.
    """

    def __init__(
        self,
        url: str,
        *,
        patience: float | Callable[[], float] = 600.0,
        timeout: float = 30.0,
        token: str | None = None,
        compress: bool = False,
    ) -> None:
        """`patience` may be what says at any moment how many seconds it is, as to give up early on SIGTERM. `compress`:
        groups travel as zstd both ways. It halves them, in the API's memory too, and costs processor time."""
        if "@" in url.partition("://")[2].partition("/")[0]:
            # The URL is in messages and logs.
            raise ConfigError(
                "password_in_url",
                "the trajectory API's URL holds a password; write it without, put the token into a file and name that "
                "in GRISTMILL_API_TOKEN_FILE (or pass token=).",
            )
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.url = url.rstrip("/")
        self._patience = patience
        self._http = httpx.AsyncClient(base_url=self.url, timeout=timeout, headers=headers)
        self._timeout = timeout
        self._compress = compress

    async def create_run(
        self, run_id: str, env: dict[str, Any], group_size: int, stack: str | None = "default"
    ) -> RunRecord:
        """Open the run, or join it when it is there with the same settings. A stack works on one open run at a time."""
        body = {"run_id": run_id, "env": env, "group_size": group_size, "stack": stack}
        return RunRecord.model_validate_json((await self._call("POST", "/v1/runs", json=body)).content)

    async def get_run(self, run_id: str) -> RunRecord:
        return RunRecord.model_validate_json((await self._call("GET", f"/v1/runs/{run_id}")).content)

    async def open_run(self, wait: float, stack: str = "default") -> RunRecord | None:
        """The stack's open run; None when there is none after `wait` seconds."""
        answer = await self._call("GET", "/v1/open", params={"stack": stack, "wait": wait}, wait=wait)
        return None if answer.status_code == 204 else RunRecord.model_validate_json(answer.content)

    async def register_atropos(self, registration: AtroposRegistration) -> None:
        """Open the run that Atropos' environments feed (the API's ATROPOS_RUN). A second registration changes
        nothing. They come in with the first version recorded."""
        await self._call("POST", "/register", json=registration.model_dump())

    async def take(
        self,
        run_id: str,
        trainer: dict[str, Any],
        covered: Sequence[str],
        step: int | None = None,
        creation: str | None = None,
    ) -> tuple[int, RunRecord]:
        """Become the run's trainer. `covered`: ids of the groups that the resumed checkpoint was trained on. `step`:
        its optimizer steps, so that a run that goes back to an older one gets permits for the steps after it.
        `creation`: `RunRecord.creation` of the run that the checkpoint was made in. Raises ApiError `other_creation` if
        the run was deleted and created again since."""
        # The word for this call and its repetitions: a second incarnation would fence off the first, which is ours.
        taker = uuid.uuid4().hex
        body = {"trainer": trainer, "covered": list(covered), "step": step, "creation": creation, "taker": taker}
        answer = (await self._call("POST", f"/v1/runs/{run_id}/take", json=body)).json()
        return int(answer["incarnation"]), RunRecord.model_validate(answer["record"])

    async def record_version(self, run_id: str, version: PolicyVersion) -> RunRecord:
        """Tell that the model server now serves `version`; permits for it become free."""
        body = {"incarnation": version.incarnation, "step": version.step}
        return RunRecord.model_validate_json(
            (await self._call("POST", f"/v1/runs/{run_id}/version", json=body)).content
        )

    async def permits(self, run_id: str, holder: str, count: int, wait: float) -> PermitGrant:
        """Ask for up to `count` permits; waits up to `wait` seconds for the first."""
        body = {"holder": holder, "count": count, "wait": wait}
        answer = await self._call("POST", f"/v1/runs/{run_id}/permits", json=body, wait=wait)
        return PermitGrant.model_validate_json(answer.content)

    async def renew_permits(self, run_id: str, holder: str, group_ids: Sequence[str]) -> list[str]:
        """Keep permits alive. Returns the ids that this holder has lost."""
        body = {"holder": holder, "group_ids": list(group_ids)}
        lost: list[str] = (await self._call("POST", f"/v1/runs/{run_id}/permits/renew", json=body)).json()["lost"]
        return lost

    async def return_permit(self, run_id: str, holder: str, group_id: str, reason: str) -> None:
        """Give a permit back: `reason` "abandoned" lets another holder have it, any other drops the group."""
        body = {"holder": holder, "group_id": group_id, "reason": reason}
        await self._call("POST", f"/v1/runs/{run_id}/permits/return", json=body)

    async def abandon_permits(self, run_id: str, holder: str) -> None:
        """Give back all the holder's permits."""
        await self._call("POST", f"/v1/runs/{run_id}/permits/abandon", json={"holder": holder})

    async def submit(self, group: TrajectoryGroup, holder: str) -> bool:
        """Store a group. False when this very group was already there."""
        answer = await self._call(
            "PUT",
            f"/v1/runs/{group.run_id}/groups/{group.group_id}",
            params={"holder": holder},
            content=compression.deflate(group.encode()) if self._compress else group.encode(),
            headers={"Content-Type": GROUP_MEDIA_TYPE, **({"Content-Encoding": "zstd"} if self._compress else {})},
        )
        return answer.status_code == 201

    async def lease(
        self,
        run_id: str,
        incarnation: int,
        batch_id: str,
        groups: int | None = None,
        *,
        sequences: int | None = None,
        tokens: int | None = None,
        max_staleness: int | None = None,
        wait: float,
    ) -> list[TrajectoryGroup] | None:
        """Lease a batch in submit order under an id of one's own; None when too little is ready after `wait`.

        Name one amount: exactly so many groups or sequences, or a budget of tokens. Groups sampled more than
        `max_staleness` steps ago are dropped on the way. The same batch id again returns the same batch.
        """
        amounts = {"groups": groups, "sequences": sequences, "tokens": tokens, "max_staleness": max_staleness}
        ask = {"incarnation": incarnation, "batch_id": batch_id, "wait": wait, "compressed": self._compress}
        body = {**ask, **amounts}
        answer = await self._call("POST", f"/v1/runs/{run_id}/lease", json=body, wait=wait)
        if answer.status_code == 204:
            return None
        bodies = _BATCH.decode(answer.content)
        return [TrajectoryGroup.decode(compression.inflated(body, _MAX_GROUP_BYTES)) for body in bodies]

    async def extend(self, run_id: str, incarnation: int, batch_ids: Sequence[str]) -> list[str]:
        """Keep leases alive. Returns the batch ids that are lost."""
        body = {"incarnation": incarnation, "batch_ids": list(batch_ids)}
        lost: list[str] = (await self._call("POST", f"/v1/runs/{run_id}/extend", json=body)).json()["lost"]
        return lost

    async def ack(self, run_id: str, incarnation: int, batch_ids: Sequence[str]) -> None:
        """Say that a durable checkpoint covers these batches."""
        body = {"incarnation": incarnation, "batch_ids": list(batch_ids)}
        await self._call("POST", f"/v1/runs/{run_id}/ack", json=body)

    async def nack(self, run_id: str, incarnation: int, batch_ids: Sequence[str]) -> int:
        """Give batches back; their groups are ready again in their places. How many groups that were."""
        body = {"incarnation": incarnation, "batch_ids": list(batch_ids)}
        return int((await self._call("POST", f"/v1/runs/{run_id}/nack", json=body)).json()["groups"])

    async def finish(self, run_id: str, incarnation: int) -> RunRecord:
        answer = await self._call("POST", f"/v1/runs/{run_id}/finish", json={"incarnation": incarnation})
        return RunRecord.model_validate_json(answer.content)

    async def close_run(self, run_id: str) -> RunRecord:
        """End a run by hand, whoever trains it, so that another may begin."""
        return RunRecord.model_validate_json((await self._call("POST", f"/v1/runs/{run_id}/close")).content)

    async def delete_run(self, run_id: str) -> None:
        """Delete a finished run and all that the store holds of it."""
        await self._call("DELETE", f"/v1/runs/{run_id}")

    async def register_env(
        self, run_id: str, env_id: str, weight: float | None = None, min_batch_allocation: float | None = None
    ) -> None:
        """Register an environment for a share of permits (`weight`) or of every batch."""
        body = {"env_id": env_id, "weight": weight, "min_batch_allocation": min_batch_allocation}
        await self._call("POST", f"/v1/runs/{run_id}/envs", json=body)

    async def heartbeat_env(self, run_id: str, env_id: str) -> None:
        """Tell that a registered environment lives: what asks for permits need not."""
        await self._call("POST", f"/v1/runs/{run_id}/envs/{env_id}/heartbeat")

    async def leave_env(self, run_id: str, env_id: str) -> None:
        """Give a registered environment's share back."""
        await self._call("DELETE", f"/v1/runs/{run_id}/envs/{env_id}")

    async def claim(self, run_id: str, name: str, holder: str, ttl: float) -> str:
        """Claim a piece of work for `ttl` seconds, or keep it. Returns who has it: `holder`, or another that was first.

        One call decides, so of several processes one gets it. The claim of a process that died runs out by itself.
        """
        body = {"name": name, "holder": holder, "ttl": ttl}
        answer = await self._call("POST", f"/v1/runs/{run_id}/claims", json=body)
        return Claim.model_validate_json(answer.content).holder

    async def report_metrics(self, run_id: str, source: str, step: int, values: Mapping[str, Any]) -> None:
        """Tell one row of metrics; a later row of the same source and step replaces it.

        `values`: numbers, words, and dicts of them, by name. A number that is not finite goes as the word for it.
        """
        body = {"source": source, "step": step, "values": _finite(values)}
        await self._call("POST", f"/v1/runs/{run_id}/metrics", json=body)

    async def metrics(self, run_id: str, source: str, after_step: int = -1) -> list[MetricsRow]:
        """A source's rows after a step, in order, at most 10,000."""
        params = {"after_step": after_step, "limit": 10_000}
        answer = await self._call("GET", f"/v1/runs/{run_id}/metrics/{source}", params=params)
        return [MetricsRow.model_validate(row) for row in answer.json()]

    async def dead_letters(self, run_id: str) -> list[DeadLetter]:
        """Groups that were set aside, the oldest 1024."""
        answer = await self._call("GET", f"/v1/runs/{run_id}/dead", params={"limit": 1024})
        return [DeadLetter.model_validate(row) for row in answer.json()]

    async def status(self, run_id: str) -> RunStatus:
        return RunStatus.model_validate_json((await self._call("GET", f"/v1/runs/{run_id}/status")).content)

    async def audit(self, run_id: str) -> GroupAudit:
        return GroupAudit.model_validate_json((await self._call("GET", f"/v1/runs/{run_id}/groups")).content)

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def _call(self, method: str, path: str, *, wait: float = 0.0, **request: Any) -> httpx.Response:
        started = time.monotonic()
        pause = 0.1
        told = False
        while True:
            pause_asked = 0.0
            try:
                answer = await self._http.request(method, path, timeout=self._timeout + wait, **request)
                if answer.status_code not in _TRANSIENT:
                    return _checked(answer)
                problem = f"HTTP {answer.status_code}: {_problem(answer)[1]}"
                pause_asked = _seconds(answer.headers.get("Retry-After"))
            except httpx.TransportError as error:
                problem = str(error) or type(error).__name__
            spent = time.monotonic() - started
            patience = self._patience() if callable(self._patience) else self._patience
            if spent >= patience:
                raise ApiUnreachable(
                    "api_unreachable",
                    f"the trajectory API at {self.url} did not answer {method} {path} for {spent:.0f} s ({problem}); "
                    "is it running, and Redis behind it?",
                    url=self.url,
                    request=f"{method} {path}",
                    problem=problem,
                )
            if not told and spent > 1.0:
                _LOG.warning("trajectory API at %s: %s; trying on for up to %.0f s", self.url, problem, patience)
                told = True
            await asyncio.sleep(min(max(pause * _JITTER.uniform(0.5, 1.5), pause_asked), patience - spent))
            pause = min(pause * 2, 3.0)


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity."""
    return {
        name: _finite(value)
        if isinstance(value, Mapping)
        else str(value)
        if isinstance(value, float) and not math.isfinite(value)
        else value
        for name, value in values.items()
    }


def _checked(answer: httpx.Response) -> httpx.Response:
    if answer.is_success:
        return answer
    code, message, remedy = _problem(answer)
    raise ApiError(code, answer.status_code, message, remedy)


def _problem(answer: httpx.Response) -> tuple[str, str, str]:
    try:
        error = answer.json()["error"]
        return str(error["code"]), str(error["message"]), str(error.get("remedy", ""))
    except (ValueError, KeyError, TypeError):
        return "unexpected", f"{answer.request.url} answered {answer.status_code}: {answer.text[:200]}", ""


def _seconds(header: str | None) -> float:
    try:
        return float(header) if header else 0.0
    except ValueError:
        return 0.0  # An HTTP date: the back-off of our own is as good.
