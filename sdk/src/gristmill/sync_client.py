"""The trajectory API's blocking client. scripts/sync_client.py writes this file from client.py.

Every method raises two errors in addition to those that its docstring names:

- ApiError, if the API refuses the call. Its `code` is one of ErrorCode. Each call for a run can have the code
  `run_missing`. Calls with an `incarnation` can also have `fenced` (another trainer took the run), `finished` and
  `suspended`.
- ApiUnreachable, if the API does not answer within the client's patience.

A call with a `creation` (`RunRecord.creation`) is refused with `other_creation` if the run was deleted and created
again since. Group ids start again in each creation, so a late call could otherwise change the next run of the same id.

At an API with tokens, a call under the name of an environment that a client with another `word` registered is refused
with `other_registration`.

All times are in seconds.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from types import TracebackType
from typing import Any

import httpx

from gristmill.group import GROUP_MEDIA_TYPE, TrajectoryGroup
from gristmill.internal import calls, connections
from gristmill.policy_version import PolicyVersion
from gristmill.run import (
    AtroposRegistration,
    Claim,
    DeadLetter,
    Environment,
    Example,
    GroupAudit,
    MetricsRow,
    PermitGrant,
    Progress,
    RowResult,
    RunEvent,
    RunRecord,
    RunStatus,
)

_PAGE = 1000
"""Records in one call of `runs`."""
_PROGRESS_STEPS = 12
"""Steps before the newest whose metrics `progress` reads."""


class SyncClient:
    """Blocking client of the trajectory API: one method for each call of /v1.

    Every call is safe to repeat, so the client retries transient failures: no connection, time-out, HTTP 429, 502, 503
    and 504. The client retries them for `patience` seconds, and then raises ApiUnreachable.

    Several threads may use one client.
    """

    def __init__(
        self,
        url: str,
        *,
        patience: float | Callable[[], float] = 600.0,
        timeout: float = 30.0,
        token: str | None = None,
        word: str | None = None,
    ) -> None:
        """`patience`: seconds, or a function that returns them. A function can return less after SIGTERM, for example.

        `timeout`: seconds for one attempt, in addition to the `wait` of a call. `token`: for an API with tokens.

        `word`: 16 to 128 letters and digits; None: a random word. At an API with tokens, only clients with the same
        word can call under the name of an environment that this client registered. A process keeps its word, so that it
        can take its registration over when it was killed and started again.

        Raises ConfigError for a URL that is none or has a password, and for a token or a proxy that cannot be used.
        """
        headers = calls.headers(url, token, word)
        self.url = url.rstrip("/")
        self._patience = patience
        self._http = connections.client(self.url, timeout=timeout, headers=headers)
        self._timeout = timeout

    def create_run(self, run_id: str, env: dict[str, Any], group_size: int, stack: str | None = "default") -> RunRecord:
        """Opens the run, or joins it if it exists with the same settings. A stack works on one open run at a time.

        `env`: the environment's settings. `group_size`: sequences per group.

        Raises ApiError `config_differs` if the run exists with other settings, `run_open` if the stack's open run has a
        living environment, `run_in_use` if an environment's token would end the work of other environments,
        `bad_config` if `env["trainer"]` is not an object, `too_many_runs`.
        """
        body = {"run_id": run_id, "env": env, "group_size": group_size, "stack": stack}
        answer = self._call("POST", "/v1/runs", json=body)
        return RunRecord.model_validate_json(answer.content)

    def list_runs(self, offset: int = 0, limit: int = 100) -> list[RunRecord]:
        """Returns up to `limit` runs (at most 1000) in the order of their creation, from number `offset`."""
        answer = self._call("GET", "/v1/runs", params={"offset": offset, "limit": limit})
        return [RunRecord.model_validate(row) for row in answer.json()]

    def runs(self) -> list[RunRecord]:
        """Returns all runs, the newest first."""
        records: list[RunRecord] = []
        while page := self.list_runs(offset=len(records), limit=_PAGE):
            records += page
            if len(page) < _PAGE:
                break
        return sorted(records, key=lambda record: -record.created_at)

    def get_run(self, run_id: str) -> RunRecord:
        """Returns the run's record. Raises ApiError `run_missing`."""
        answer = self._call("GET", calls.run_path(run_id))
        return RunRecord.model_validate_json(answer.content)

    def open_run(self, wait: float, stack: str = "default") -> RunRecord | None:
        """Returns the stack's open run, or None if no run is open after `wait` seconds."""
        answer = self._call("GET", "/v1/open", params={"stack": stack, "wait": wait}, wait=wait)
        return None if answer.status_code == 204 else RunRecord.model_validate_json(answer.content)

    def status(self, run_id: str) -> RunStatus:
        """Returns the counts of the run. The cost does not grow with the run."""
        answer = self._call("GET", calls.run_path(run_id, "status"))
        return RunStatus.model_validate_json(answer.content)

    def progress(self, run_id: str) -> Progress:
        """Returns step, total, reward, speed and remaining time of a run: two cheap calls."""
        record = self.get_run(run_id)
        step = PolicyVersion.parse(record.version).step if record.version else 0
        rows = self.metrics(run_id, "trainer", after_step=max(step - _PROGRESS_STEPS, -1), limit=_PAGE)
        return Progress.of(record, [{**row.values, "step": row.step} for row in rows])

    def register_atropos(self, registration: AtroposRegistration) -> None:
        """Opens the run that Atropos' environments feed (the API's ATROPOS_RUN).

        A second registration changes nothing. The environments can join after the first recorded version.
        """
        self._call("POST", "/register", json=registration.model_dump())

    def take(
        self,
        run_id: str,
        trainer: dict[str, Any],
        covered: Sequence[str],
        step: int | None = None,
        creation: str | None = None,
    ) -> tuple[int, RunRecord]:
        """Registers the caller as the run's trainer. Returns its incarnation and the run's record.

        `trainer`: the trainer's settings. The API reads batch_size, gradient_accumulation_steps, training_steps and
        max_staleness from them. `covered`: ids of the groups that the resumed checkpoint was trained on.
        `step`: optimizer steps of the resumed checkpoint. If the checkpoint is older than the run, the API issues
        permits for the steps after it. `creation`: `RunRecord.creation` of the checkpoint's run.

        Raises ApiError `other_creation` if the run was deleted and created again since, `config_differs` for other
        settings after a finished step, `finished`, `suspended`.
        """
        # Retries send the same word, so the API counts them as one trainer: a second incarnation would fence the first.
        taker = uuid.uuid4().hex
        body = {"trainer": trainer, "covered": list(covered), "step": step, "creation": creation, "taker": taker}
        answer = self._call("POST", calls.run_path(run_id, "take"), json=body)
        fields = answer.json()
        return int(fields["incarnation"]), RunRecord.model_validate(fields["record"])

    def record_version(self, run_id: str, version: PolicyVersion | str, *, creation: str | None = None) -> RunRecord:
        """Reports that the model server now serves `version`, or the version with this label. The API then frees
        permits for this version.

        Raises ApiError `version_backwards` for a version before the recorded version, and ValueError for a text that
        is not a label.
        """
        version = PolicyVersion.of(version)
        body = {"incarnation": version.incarnation, "step": version.step}
        answer = self._call("POST", calls.run_path(run_id, "version"), json=body, creation=creation)
        return RunRecord.model_validate_json(answer.content)

    def finish(self, run_id: str, incarnation: int, *, creation: str | None = None) -> RunRecord:
        """Ends the run, as its trainer. Environments receive the state with their next request for permits."""
        answer = self._call(
            "POST", calls.run_path(run_id, "finish"), json={"incarnation": incarnation}, creation=creation
        )
        return RunRecord.model_validate_json(answer.content)

    def close_run(self, run_id: str) -> RunRecord:
        """Ends a run by hand, whichever trainer holds it, so that another run may begin."""
        answer = self._call("POST", calls.run_path(run_id, "close"))
        return RunRecord.model_validate_json(answer.content)

    def delete_run(self, run_id: str) -> None:
        """Deletes a finished run and all its data in the store.

        Raises ApiError `run_open` for a run that is not finished, `archiving` while its groups are being archived.
        """
        self._call("DELETE", calls.run_path(run_id))

    def permits(self, run_id: str, holder: str, count: int, wait: float, *, creation: str | None = None) -> PermitGrant:
        """Requests up to `count` permits (at most 1024) and waits up to `wait` seconds for the first.

        `holder`: the name of this process; each process needs a different name. A permit expires after
        API_PERMIT_TTL_S seconds (30) without a renewal. Raises ApiError `suspended`, or `no_permits` for a run that
        Atropos' environments feed.
        """
        body = {"holder": holder, "count": count, "wait": wait}
        answer = self._call("POST", calls.run_path(run_id, "permits"), json=body, wait=wait, creation=creation)
        return PermitGrant.model_validate_json(answer.content).to(run_id, holder)

    def renew_permits(
        self, run_id: str, holder: str, group_ids: Sequence[str] | None, *, creation: str | None = None
    ) -> list[str]:
        """Renews permits. Returns the group ids of the permits that this holder has lost.

        `group_ids`: None renews all permits of the holder. Name them, because None also renews permits whose grant
        the holder never received.
        """
        body = {"holder": holder, "group_ids": None if group_ids is None else list(group_ids)}
        answer = self._call("POST", calls.run_path(run_id, "permits", "renew"), json=body, creation=creation)
        lost: list[str] = answer.json()["lost"]
        return lost

    def return_permit(
        self,
        run_id: str,
        holder: str,
        group_id: str,
        reason: str,
        *,
        result: RowResult | None = None,
        creation: str | None = None,
    ) -> None:
        """Returns a permit to the API.

        With `reason` "abandoned", another holder may get the permit. Any other reason drops the group. A reason has 1
        to 64 lower-case letters, digits and underscores. `result`: of the dropped group, if it was scored, in a run
        whose rows may rest. Raises ApiError `permit_lost`, or `conflict` if the group was submitted.
        """
        body: dict[str, Any] = {"holder": holder, "group_id": group_id, "reason": reason}
        if result is not None:
            body["result"] = result.model_dump(mode="json")
        self._call("POST", calls.run_path(run_id, "permits", "return"), json=body, creation=creation)

    def abandon_permits(self, run_id: str, holder: str, *, creation: str | None = None) -> None:
        """Returns all permits of the holder to the API."""
        self._call("POST", calls.run_path(run_id, "permits", "abandon"), json={"holder": holder}, creation=creation)

    def submit(
        self, group: TrajectoryGroup, holder: str, *, result: RowResult | None = None, creation: str | None = None
    ) -> bool:
        """Stores a group. Returns False if the API had already stored the same group.

        `result`: of the group, in a run whose rows may rest. Raises ApiError `permit_lost` if the holder no longer has
        the permit, `conflict` if another group has the id, `bad_group`, `too_large`, `finished`, `suspended`.
        """
        answer = self._call(
            "PUT",
            calls.run_path(group.run_id, "groups", group.group_id),
            params={"holder": holder, **({} if result is None else {"result": result.model_dump_json()})},
            creation=creation,
            content=group.encode(),
            headers={"Content-Type": GROUP_MEDIA_TYPE},
        )
        return answer.status_code == 201

    def read_group(self, run_id: str, group_id: str) -> TrajectoryGroup:
        """Returns a group that the store holds: ready, leased, dead, or waiting to be archived.

        Raises ApiError `group_missing`.
        """
        answer = self._call("GET", calls.run_path(run_id, "groups", group_id))
        return TrajectoryGroup.decode(answer.content)

    def read_example(self, run_id: str, group_id: str) -> Example:
        """Returns the readable beginning of a group, whichever protocol it was submitted with.

        Raises ApiError `group_missing`.
        """
        headers = {"Accept": "application/json"}
        answer = self._call("GET", calls.run_path(run_id, "groups", group_id), headers=headers)
        return Example.model_validate_json(answer.content)

    def audit(self, run_id: str) -> GroupAudit:
        """Returns the ids of all groups by state. The cost grows with the run."""
        answer = self._call("GET", calls.run_path(run_id, "groups"))
        return GroupAudit.model_validate_json(answer.content)

    def lease(
        self,
        run_id: str,
        incarnation: int,
        batch_id: str,
        groups: int | None = None,
        *,
        sequences: int | None = None,
        wait: float,
        creation: str | None = None,
    ) -> list[TrajectoryGroup] | None:
        """Leases a batch in submit order. Returns None if too few groups are ready after `wait` seconds.

        Name one exact amount: `groups` or, in a run of Atropos' environments, `sequences`. The caller chooses
        `batch_id`, and a repeated `batch_id` returns the same batch. The lease expires after API_LEASE_TTL_S seconds
        (120) without an `extend`.

        Raises ApiError `batch_acked`, or `lease_lost` if the lease expires during the answer.
        """
        amounts = {"groups": groups, "sequences": sequences}
        ask = {"incarnation": incarnation, "batch_id": batch_id, "wait": wait}
        answer = self._call(
            "POST", calls.run_path(run_id, "lease"), json={**ask, **amounts}, wait=wait, creation=creation
        )
        return None if answer.status_code == 204 else calls.decode_batch(answer.content)

    def extend(
        self, run_id: str, incarnation: int, batch_ids: Sequence[str], *, creation: str | None = None
    ) -> list[str]:
        """Extends leases. Returns the batch ids whose leases are lost."""
        body = {"incarnation": incarnation, "batch_ids": list(batch_ids)}
        answer = self._call("POST", calls.run_path(run_id, "extend"), json=body, creation=creation)
        lost: list[str] = answer.json()["lost"]
        return lost

    def ack(self, run_id: str, incarnation: int, batch_ids: Sequence[str], *, creation: str | None = None) -> None:
        """Reports that a durable checkpoint covers these batches.

        Raises ApiError `lease_lost` if some leases expired. The API has acked the other batches then.
        """
        body = {"incarnation": incarnation, "batch_ids": list(batch_ids)}
        self._call("POST", calls.run_path(run_id, "ack"), json=body, creation=creation)

    def nack(self, run_id: str, incarnation: int, batch_ids: Sequence[str], *, creation: str | None = None) -> int:
        """Returns batches to the queue, where their groups get their old places back. Returns the number of groups."""
        body = {"incarnation": incarnation, "batch_ids": list(batch_ids)}
        answer = self._call("POST", calls.run_path(run_id, "nack"), json=body, creation=creation)
        return int(answer.json()["groups"])

    def register_env(
        self,
        run_id: str,
        env_id: str,
        weight: float | None = None,
        heartbeat_s: float | None = None,
        *,
        creation: str | None = None,
    ) -> None:
        """Registers an environment. With a `weight`, it holds at most its share of the permits.

        `heartbeat_s`: seconds between its heartbeats. Views of the run then report the environment when it misses two.

        The environment counts as alive for API_ENV_TTL_S seconds (60) after each heartbeat or request for permits.
        Raises ApiError `too_many_envs`, and `other_registration` if a client with another word registered the name and
        the API has tokens.
        """
        body: dict[str, Any] = {"env_id": env_id, "weight": weight}
        if heartbeat_s is not None:  # an earlier API does not know it
            body["heartbeat_s"] = heartbeat_s
        self._call("POST", calls.run_path(run_id, "envs"), json=body, creation=creation)

    def environments(self, run_id: str) -> list[Environment]:
        """Returns the registered environments."""
        answer = self._call("GET", calls.run_path(run_id, "envs"))
        return [Environment.model_validate(row) for row in answer.json()]

    def heartbeat_env(self, run_id: str, env_id: str, *, creation: str | None = None) -> None:
        """Reports that a registered environment is alive. A request for permits reports the same.

        Raises ApiError `env_missing`.
        """
        self._call("POST", calls.run_path(run_id, "envs", env_id, "heartbeat"), creation=creation)

    def leave_env(self, run_id: str, env_id: str, *, creation: str | None = None) -> None:
        """Removes the registration of an environment and frees its share. Raises ApiError `env_missing`."""
        self._call("DELETE", calls.run_path(run_id, "envs", env_id), creation=creation)

    def claim(self, run_id: str, name: str, holder: str, ttl: float, *, creation: str | None = None) -> str:
        """Claims a piece of work for `ttl` seconds (1 to 3600), or extends the claim. Returns the holder of the claim.

        The returned holder is `holder`, or a process that claimed the work earlier. The claim is atomic, so exactly one
        of several processes gets the work. The claim of a process that was killed expires after its `ttl`.
        Raises ApiError `too_many_claims`.
        """
        body = {"name": name, "holder": holder, "ttl": ttl}
        answer = self._call("POST", calls.run_path(run_id, "claims"), json=body, creation=creation)
        return Claim.model_validate_json(answer.content).holder

    def dead_letters(self, run_id: str, offset: int = 0, limit: int = 1024) -> list[DeadLetter]:
        """Returns the quarantined groups, oldest first, from number `offset`. `limit`: at most 1024."""
        answer = self._call("GET", calls.run_path(run_id, "dead"), params={"offset": offset, "limit": limit})
        return [DeadLetter.model_validate(row) for row in answer.json()]

    def replay_dead_letters(self, run_id: str, group_ids: Sequence[str] | None = None) -> int:
        """Makes dead letters ready again, in their old places. Returns the number of groups.

        `group_ids`: at most 4096 ids; None: all dead letters of the run.
        """
        return self._settle_dead_letters(run_id, "replay", group_ids)

    def purge_dead_letters(self, run_id: str, group_ids: Sequence[str] | None = None) -> int:
        """Drops dead letters with the reason "purged". Returns the number of groups. `group_ids`: as in replay."""
        return self._settle_dead_letters(run_id, "purge", group_ids)

    def report_metrics(
        self, run_id: str, source: str, step: int, values: Mapping[str, Any], *, creation: str | None = None
    ) -> None:
        """Sends one row of metrics. A later row of the same source and step replaces it.

        `values`: numbers, strings, and dicts of them, by name. The client sends NaN and infinity as strings.
        Raises ApiError `too_many_sources`, or `too_large` for more than 32 KiB of JSON.
        """
        body = {"source": source, "step": step, "values": calls.finite(values)}
        self._call("POST", calls.run_path(run_id, "metrics"), json=body, creation=creation)

    def metric_sources(self, run_id: str) -> list[str]:
        """Returns the names of the sources that reported metrics."""
        answer = self._call("GET", calls.run_path(run_id, "metrics"))
        sources: list[str] = answer.json()
        return sources

    def metrics(self, run_id: str, source: str, after_step: int = -1, limit: int = 10_000) -> list[MetricsRow]:
        """Returns the rows of a source after `after_step`, in order of steps. `limit`: at most 10,000.

        A source of Gristmill's services ("trainer", "eval", ...) may have no rows yet. Raises ApiError `source_missing`
        for any other source that reported nothing.
        """
        params = {"after_step": after_step, "limit": limit}
        answer = self._call("GET", calls.run_path(run_id, "metrics", source), params=params)
        return [MetricsRow.model_validate(row) for row in answer.json()]

    def events(self, run_id: str, after: str | None = None) -> Generator[RunEvent, None, None]:
        """Yields the events of the run as they happen, without an end. Connects again if the connection is lost.

        `after`: the id of the last known event. None: only new events. The API keeps about the newest 1024 events.
        Raises ApiError `run_missing`, also if the run is deleted meanwhile.
        """
        path = calls.run_path(run_id, "events")
        retries = calls.Retries(self.url, f"GET {path}", self._patience)
        while True:
            headers = {} if after is None else {"Last-Event-ID": after}
            try:
                silence = self._timeout + calls.EVENTS_SILENCE
                with self._http.stream("GET", path, headers=headers, timeout=silence) as answer:
                    if not calls.is_answer(answer):
                        answer.read()
                    if retries.result(answer) is None:
                        pause = retries.pause(answer)
                    else:
                        retries = calls.Retries(self.url, f"GET {path}", self._patience)
                        pause = 1.0  # The API closes the stream when it stops, or when the run is deleted.
                        line = b""
                        for part in answer.iter_bytes():
                            # httpx's lines also end at characters that JSON has in its strings, such as U+2028.
                            *lines, line = (line + part).split(b"\n")
                            for whole in lines:
                                if (event := calls.decode_event(whole.decode())) is not None:
                                    after = event.id
                                    yield event
                                elif after is None and whole.startswith(b"id:"):
                                    after = whole[3:].decode().strip()  # The first event comes after this id.
            except httpx.TransportError as error:
                pause = retries.pause(error)
            time.sleep(pause)

    def examples(self, run_id: str, limit: int = 1) -> list[Example]:
        """Returns the readable beginnings of the groups that were submitted last, newest first. `limit`: at most 8.

        `Example.texts(tokenizer)` returns their prompts and completions as text.
        """
        answer = self._call("GET", calls.run_path(run_id, "examples"), params={"limit": limit})
        return [Example.model_validate(row) for row in answer.json()]

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def __enter__(self) -> SyncClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _settle_dead_letters(self, run_id: str, how: str, group_ids: Sequence[str] | None) -> int:
        body = {"group_ids": None if group_ids is None else list(group_ids)}
        answer = self._call("POST", calls.run_path(run_id, "dead", how), json=body)
        return int(answer.json()["groups"])

    def _call(
        self, method: str, path: str, *, wait: float = 0.0, creation: str | None = None, **request: Any
    ) -> httpx.Response:
        if creation:
            request["params"] = {**request.get("params", {}), "creation": creation}
        retries = calls.Retries(self.url, f"{method} {path}", self._patience)
        while True:
            try:
                answer = self._http.request(method, path, timeout=self._timeout + wait, **request)
                if retries.result(answer) is not None:
                    return answer
                pause = retries.pause(answer)
            except httpx.TransportError as error:
                pause = retries.pause(error)
            time.sleep(pause)
