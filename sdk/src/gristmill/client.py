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
# A separate generator, because a trainer saves the process' generator in checkpoints, and retries must not advance it.
_JITTER = random.Random()
_BATCH = msgspec.msgpack.Decoder(list[bytes])


class Client:
    """Async client of the trajectory API. Every call is safe to repeat, so the client retries transient failures.

    Transient failures are: no connection, time-out, HTTP 429, 502, 503 and 504. The client retries them for `patience`
    seconds, and then raises ApiUnreachable. Any other error response raises ApiError at once.
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
        """`patience`: seconds, or a function that returns them. A function can return less after SIGTERM, for example.

        `compress`: groups travel as zstd in both directions. It halves the size of groups, also in the API's memory,
        and costs processor time.
        """
        if "@" in url.partition("://")[2].partition("/")[0]:
            # Messages and logs contain the URL.
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
        """Opens the run, or joins it if it exists with the same settings. A stack works on one open run at a time."""
        body = {"run_id": run_id, "env": env, "group_size": group_size, "stack": stack}
        return RunRecord.model_validate_json((await self._call("POST", "/v1/runs", json=body)).content)

    async def get_run(self, run_id: str) -> RunRecord:
        return RunRecord.model_validate_json((await self._call("GET", f"/v1/runs/{run_id}")).content)

    async def open_run(self, wait: float, stack: str = "default") -> RunRecord | None:
        """Returns the stack's open run, or None if no run is open after `wait` seconds."""
        answer = await self._call("GET", "/v1/open", params={"stack": stack, "wait": wait}, wait=wait)
        return None if answer.status_code == 204 else RunRecord.model_validate_json(answer.content)

    async def register_atropos(self, registration: AtroposRegistration) -> None:
        """Opens the run that Atropos' environments feed (the API's ATROPOS_RUN).

        A second registration changes nothing. The environments can join after the first recorded version.
        """
        await self._call("POST", "/register", json=registration.model_dump())

    async def take(
        self,
        run_id: str,
        trainer: dict[str, Any],
        covered: Sequence[str],
        step: int | None = None,
        creation: str | None = None,
    ) -> tuple[int, RunRecord]:
        """Registers the caller as the run's trainer. Returns its incarnation and the run's record.

        `covered`: ids of the groups that the resumed checkpoint was trained on.
        `step`: optimizer steps of the resumed checkpoint. If the checkpoint is older than the run, the API issues
        permits for the steps after it.
        `creation`: `RunRecord.creation` of the checkpoint's run. Raises ApiError `other_creation` if the run was
        deleted and created again since.
        """
        # Retries send the same word, so the API counts them as one trainer: a second incarnation would fence the first.
        taker = uuid.uuid4().hex
        body = {"trainer": trainer, "covered": list(covered), "step": step, "creation": creation, "taker": taker}
        answer = (await self._call("POST", f"/v1/runs/{run_id}/take", json=body)).json()
        return int(answer["incarnation"]), RunRecord.model_validate(answer["record"])

    async def record_version(self, run_id: str, version: PolicyVersion) -> RunRecord:
        """Reports that the model server now serves `version`. The API then frees permits for this version."""
        body = {"incarnation": version.incarnation, "step": version.step}
        return RunRecord.model_validate_json(
            (await self._call("POST", f"/v1/runs/{run_id}/version", json=body)).content
        )

    async def permits(self, run_id: str, holder: str, count: int, wait: float) -> PermitGrant:
        """Requests up to `count` permits and waits up to `wait` seconds for the first."""
        body = {"holder": holder, "count": count, "wait": wait}
        answer = await self._call("POST", f"/v1/runs/{run_id}/permits", json=body, wait=wait)
        return PermitGrant.model_validate_json(answer.content)

    async def renew_permits(self, run_id: str, holder: str, group_ids: Sequence[str]) -> list[str]:
        """Renews permits. Returns the group ids of the permits that this holder has lost."""
        body = {"holder": holder, "group_ids": list(group_ids)}
        lost: list[str] = (await self._call("POST", f"/v1/runs/{run_id}/permits/renew", json=body)).json()["lost"]
        return lost

    async def return_permit(self, run_id: str, holder: str, group_id: str, reason: str) -> None:
        """Returns a permit to the API.

        With `reason` "abandoned", another holder may get the permit. Any other reason drops the group.
        """
        body = {"holder": holder, "group_id": group_id, "reason": reason}
        await self._call("POST", f"/v1/runs/{run_id}/permits/return", json=body)

    async def abandon_permits(self, run_id: str, holder: str) -> None:
        """Returns all permits of the holder to the API."""
        await self._call("POST", f"/v1/runs/{run_id}/permits/abandon", json={"holder": holder})

    async def submit(self, group: TrajectoryGroup, holder: str) -> bool:
        """Stores a group. Returns False if the API had already stored the same group."""
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
        """Leases a batch in submit order. Returns None if too few groups are ready after `wait` seconds.

        Name one amount: an exact number of `groups` or `sequences`, or a budget of `tokens`. The caller chooses
        `batch_id`, and a repeated `batch_id` returns the same batch. The API drops groups that were sampled more than
        `max_staleness` steps ago.
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
        """Extends leases. Returns the batch ids whose leases are lost."""
        body = {"incarnation": incarnation, "batch_ids": list(batch_ids)}
        lost: list[str] = (await self._call("POST", f"/v1/runs/{run_id}/extend", json=body)).json()["lost"]
        return lost

    async def ack(self, run_id: str, incarnation: int, batch_ids: Sequence[str]) -> None:
        """Reports that a durable checkpoint covers these batches."""
        body = {"incarnation": incarnation, "batch_ids": list(batch_ids)}
        await self._call("POST", f"/v1/runs/{run_id}/ack", json=body)

    async def nack(self, run_id: str, incarnation: int, batch_ids: Sequence[str]) -> int:
        """Returns batches to the queue, where their groups get their old places back. Returns the number of groups."""
        body = {"incarnation": incarnation, "batch_ids": list(batch_ids)}
        return int((await self._call("POST", f"/v1/runs/{run_id}/nack", json=body)).json()["groups"])

    async def finish(self, run_id: str, incarnation: int) -> RunRecord:
        answer = await self._call("POST", f"/v1/runs/{run_id}/finish", json={"incarnation": incarnation})
        return RunRecord.model_validate_json(answer.content)

    async def close_run(self, run_id: str) -> RunRecord:
        """Ends a run by hand, whichever trainer holds it, so that another run may begin."""
        return RunRecord.model_validate_json((await self._call("POST", f"/v1/runs/{run_id}/close")).content)

    async def delete_run(self, run_id: str) -> None:
        """Deletes a finished run and all its data in the store."""
        await self._call("DELETE", f"/v1/runs/{run_id}")

    async def register_env(
        self, run_id: str, env_id: str, weight: float | None = None, min_batch_allocation: float | None = None
    ) -> None:
        """Registers an environment for a share of permits (`weight`) or of every batch (`min_batch_allocation`)."""
        body = {"env_id": env_id, "weight": weight, "min_batch_allocation": min_batch_allocation}
        await self._call("POST", f"/v1/runs/{run_id}/envs", json=body)

    async def heartbeat_env(self, run_id: str, env_id: str) -> None:
        """Reports that a registered environment is alive. A request for permits reports the same."""
        await self._call("POST", f"/v1/runs/{run_id}/envs/{env_id}/heartbeat")

    async def leave_env(self, run_id: str, env_id: str) -> None:
        """Removes the registration of an environment and frees its share."""
        await self._call("DELETE", f"/v1/runs/{run_id}/envs/{env_id}")

    async def claim(self, run_id: str, name: str, holder: str, ttl: float) -> str:
        """Claims a piece of work for `ttl` seconds, or extends the claim. Returns the holder of the claim.

        The returned holder is `holder`, or a process that claimed the work earlier. The claim is atomic, so exactly one
        of several processes gets the work. The claim of a process that was killed expires after its `ttl`.
        """
        body = {"name": name, "holder": holder, "ttl": ttl}
        answer = await self._call("POST", f"/v1/runs/{run_id}/claims", json=body)
        return Claim.model_validate_json(answer.content).holder

    async def report_metrics(self, run_id: str, source: str, step: int, values: Mapping[str, Any]) -> None:
        """Sends one row of metrics. A later row of the same source and step replaces it.

        `values`: numbers, strings, and dicts of them, by name. The client sends NaN and infinity as strings.
        """
        body = {"source": source, "step": step, "values": _finite(values)}
        await self._call("POST", f"/v1/runs/{run_id}/metrics", json=body)

    async def metrics(self, run_id: str, source: str, after_step: int = -1) -> list[MetricsRow]:
        """Returns the rows of a source after `after_step`, in order of steps, at most 10,000."""
        params = {"after_step": after_step, "limit": 10_000}
        answer = await self._call("GET", f"/v1/runs/{run_id}/metrics/{source}", params=params)
        return [MetricsRow.model_validate(row) for row in answer.json()]

    async def dead_letters(self, run_id: str) -> list[DeadLetter]:
        """Returns the quarantined groups, at most the oldest 1024."""
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
    """Returns the values with NaN and infinity as strings, because JSON has no numbers for them."""
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
        return 0.0  # The header holds an HTTP date: the client's own back-off is good enough.
