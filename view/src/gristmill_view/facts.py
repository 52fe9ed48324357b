"""Reads the facts about a run from a live API (`ApiReader`) or from the run's files alone (`read_files`).

The files of a run may be in several roots: in Compose, the trainer's, the API's and the environment's volumes. A file
counts from the first root that has it.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec

from gristmill.archive.drops import read_drops
from gristmill.errors import GristmillError
from gristmill.folders import EVALUATION_RESULTS_FILE, EVALUATIONS_FOLDER, RunFolder, last_change
from gristmill.internal import connections, foreign
from gristmill.internal.metrics import METRICS_FILE, number, pace, readable
from gristmill.internal.receipts import Receipt
from gristmill.internal.trouble import ServerFacts, read_server
from gristmill.model_servers import ServerAddresses, find_all
from gristmill.policy_version import PolicyVersion
from gristmill.run import Environment, RunRecord, RunState, RunStatus
from gristmill.sync_client import SyncClient
from gristmill_view.phases import Log, read_log

STALE_S: Final = 120.0
"""Seconds without a new line, after which a service without an API to ask counts as gone."""
STOPPED: Final = "stopped"
"""State of an unfinished run on which no service works, as its files show it."""
_SERVER_TIMEOUT = 2.0
_TRAINER_EVENTS = frozenset({"take", "version", "lease", "nack", "ack", "finish"})
_ORDER = ("redis", "api", "model", "trainer", "env")
"""Services in the order of a group's way."""


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """A process of the run."""

    name: str
    state: str
    """up, waiting, down, done or unknown."""
    version: str | None = None
    """The policy version that the service works with."""
    heartbeat_s: float | None = None
    """Seconds since the service was seen last."""
    detail: str = ""
    """The present work of the service, or the reason why it stopped."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything that `overview` reads. Times are Unix times in seconds."""

    run: str
    state: str
    rows: Sequence[Mapping[str, Any]] = ()
    """The trainer's metrics, flat or nested, in order of steps. Each has its `step`."""
    evaluations: Sequence[Mapping[str, Any]] = ()
    """Rows of the source `eval`, in order of steps. Each has its `step`."""
    record: RunRecord | None = None
    status: RunStatus | None = None
    """None without a live API."""
    version: str | None = None
    steps: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    services: Sequence[Service] = ()
    servers: Sequence[ServerFacts] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)
    receipts: Sequence[Receipt] = ()
    """From the run's files; a live API has their counts in `rows` only."""
    seconds: float | None = None
    """Time of all steps, if the reader knows it without adding up all rows."""
    warnings: Sequence[str] = ()
    """The last warnings and errors of the services' logs, if there are logs."""
    phase: str = ""
    """The phase before the first step, if the logs show it."""
    started: float | None = None
    free_bytes: int | None = None
    """Free space on the disk of the run's files."""
    folders: Sequence[Path] = ()
    """The run's folder in each root that has one."""

    @property
    def accepted(self) -> int:
        """Groups that the store accepted. Files count only the groups of finished steps."""
        if self.status is not None:
            return self.status.accepted
        return sum(sum(row.get("staleness", {}).values()) for row in self.rows)

    def with_files(self, run: RunFolder) -> Facts:
        """Returns the facts with the contents that only the run's files have: receipts, warnings, and their places."""
        if not run.folders:  # the files are on another machine, or in volumes
            return self
        warnings = [warning for log in read_logs(run, self.record).values() for warning in log.warnings]
        receipts, free = run.receipts(self.record), free_bytes(run.folders[0])
        return replace(self, receipts=receipts, warnings=warnings, folders=run.folders, free_bytes=free)


# --- A live API ------------------------------------------------------------------------------------------------
class ApiReader:
    """Reads one run from the API, again and again. Each `read` asks only for new rows of metrics.

    With `follow`, a thread follows the run's events, so that each service's last sign of life is known.
    """

    def __init__(self, client: SyncClient, run_id: str, *, model_urls: Sequence[str] = (), follow: bool = True) -> None:
        """`client`: with a short patience, because a view must not wait for minutes."""
        self._client = client
        self._run_id = run_id
        self._addresses = [ServerAddresses(url) for url in model_urls]
        # One client per server, because a client takes longer to make than a hundred requests.
        self._servers: dict[str, httpx.Client] = {}  # noqa: TID251
        self._rows: dict[str, dict[int, dict[str, Any]]] = {"trainer": {}, "eval": {}}
        self._timed = (0, 0.0)
        """The last step whose time is added up, and the sum in seconds."""
        self._creation = ""
        self._incarnation = -1
        self._heard: dict[str, float] = {}
        """Service to the Unix time of its last event."""
        self._follows = follow
        self._follower: threading.Thread | None = None

    def read(self) -> Facts:
        """Reads the run. One thread at a time may call it. Raises ApiError and ApiUnreachable as the client does."""
        record = self._client.get_run(self._run_id)
        if record.creation != self._creation:  # deleted and created again: every row is of another training
            self._creation, self._incarnation = record.creation, -1
            self._rows["eval"].clear()
        if record.incarnation != self._incarnation:  # a resumed trainer replaces rows of earlier steps
            self._incarnation = record.incarnation
            self._rows["trainer"].clear()
            self._timed = (0, 0.0)
        if self._follows and (self._follower is None or not self._follower.is_alive()):
            self._follower = threading.Thread(target=self._follow, name="run-events", daemon=True)
            self._follower.start()
        status = self._client.status(self._run_id)
        environments = self._client.environments(self._run_id)
        rows, evaluations = self._read_rows("trainer"), self._read_rows("eval")
        servers = self._read_servers()
        return Facts(
            run=record.run_id,
            state=str(record.state),
            rows=rows,
            evaluations=evaluations,
            record=record,
            status=status,
            version=record.version,
            steps=record.training_steps,
            settings=settings_of(record),
            services=self._services(record, status, environments, servers),
            servers=servers,
            dropped=status.dropped,
            seconds=self._seconds(rows),
            started=record.created_at,
        )

    def _read_servers(self) -> list[ServerFacts]:
        addresses = find_all(self._addresses)
        for url in addresses:
            if url not in self._servers:
                self._servers[url] = connections.client(url, timeout=_SERVER_TIMEOUT)
        return [read_server(url, self._servers[url]) for url in addresses]

    def _seconds(self, rows: Sequence[Mapping[str, Any]]) -> float | None:
        """Returns the time of all steps. The newest row may be replaced, so the kept sum is without it."""
        if not rows:
            return None
        last, total = self._timed
        new = itertools.takewhile(lambda row: row["step"] > last, reversed(rows[:-1]))
        self._timed = (max(last, rows[-1]["step"] - 1), total + sum(map(row_seconds, new)))
        return self._timed[1] + row_seconds(rows[-1])

    def _read_rows(self, source: str) -> list[dict[str, Any]]:
        known = self._rows[source]
        # The newest row is read again, because a row may be replaced.
        after = max(known, default=0) - 1
        while page := self._client.metrics(self._run_id, source, after_step=max(after, -1), limit=_PAGE):
            known.update((row.step, {**readable(row.values), "step": row.step}) for row in page)
            if page[-1].step <= after or len(page) < _PAGE:
                break
            after = page[-1].step
        steps = sorted(known)
        for step in steps[:-_MOST_ROWS]:
            del known[step]
        return [known[step] for step in steps[-_MOST_ROWS:]]

    def _services(
        self, record: RunRecord, status: RunStatus, environments: Sequence[Environment], servers: Sequence[ServerFacts]
    ) -> list[Service]:
        services = [Service(name="api", state="up", heartbeat_s=0.0, detail=f"protocol {record.protocol}")]
        services += [_server_service(server, several=len(servers) > 1) for server in servers]
        services.append(_trainer_service(record, status, self._ago("trainer")))
        living = [environment for environment in environments if environment.alive]
        for environment in environments:
            asked = status.last_asked_s if environment.alive and len(living) == 1 else None
            signs = [self._ago(environment.env_id), environment.last_seen_s, asked]
            seconds = min((sign for sign in signs if sign is not None), default=None)
            state = "done" if record.state == RunState.FINISHED else "down"
            if environment.alive and not environment.late:
                state = "up" if status.outstanding else "waiting"
            alone = environment.alive and len(living) == 1 and status.outstanding > 0
            detail = f"{status.outstanding} rows in work" if alone else ""
            if state == "down":
                detail = "sends no heartbeat"
            services.append(Service(name=f"env {environment.env_id}", state=state, heartbeat_s=seconds, detail=detail))
        if not environments:
            done = record.state == RunState.FINISHED
            services.append(Service(name="env", state="done" if done else "down", detail="none is registered"))
        return services

    def _ago(self, actor: str) -> float | None:
        return max(time.time() - self._heard[actor], 0.0) if actor in self._heard else None

    def _follow(self) -> None:
        try:
            for event in self._client.events(self._run_id, after="0-0"):
                actor = event.fields.get("env") if event.kind in ("submit", "drop", "env") else None
                if event.kind in _TRAINER_EVENTS or event.fields.get("source") == "trainer":
                    actor = "trainer"
                if actor:
                    self._heard[actor] = int(event.id.partition("-")[0]) / 1000
        except (GristmillError, httpx.HTTPError, OSError, RuntimeError):
            self._heard.clear()  # The API or the client is gone, and `read` reports it. Old times would mislead.


_MOST_ROWS = 10_000
"""Rows of metrics per source; the API keeps no more either."""
_PAGE = 500
"""Rows of one question, so that the API answers other requests between them."""


def row_seconds(row: Mapping[str, Any]) -> float:
    """Returns the time of a step."""
    return sum(number(value) or 0.0 for value in row.get("seconds", {}).values())


def trainer_has_batch(record: RunRecord, status: RunStatus) -> bool:
    """Returns whether the trainer has the groups of its next step.

    Leased groups alone do not show it: the groups of finished steps stay leased until a checkpoint covers them.
    """
    if record.groups_per_step is None or record.version is None:
        return status.leased > 0
    step = PolicyVersion.parse(record.version).step + 1
    return status.leased > 0 and status.trained + status.leased >= step * record.groups_per_step


def settings_of(record: RunRecord) -> dict[str, Any]:
    """Returns the settings of the environment, with the trainer's under `trainer`."""
    return {**record.env, "trainer": {**(record.env.get("trainer") or {}), **(record.trainer or {})}}


def _trainer_service(record: RunRecord, status: RunStatus, seconds: float | None) -> Service:
    name = "trainer"
    if record.state == RunState.FINISHED:
        return Service(name=name, state="done", version=record.version, heartbeat_s=seconds)
    if record.trainer is None:
        return Service(name=name, state="down", detail="no trainer has taken the run")
    state, detail = ("up", "trains") if trainer_has_batch(record, status) else ("waiting", "waits for groups")
    if record.version is None:
        state, detail = "up", "loads the model and publishes its weights"
    return Service(name=name, state=state, version=record.version, heartbeat_s=seconds, detail=detail)


def _server_service(server: ServerFacts, *, several: bool) -> Service:
    name = f"model {server.url.rpartition('/')[2]}" if several else "model"
    if server.problem is not None:
        state = "waiting" if server.busy else "down"
        return Service(name=name, state=state, detail=f"busy: {server.problem}" if server.busy else server.problem)
    detail = "paused" if server.paused else ""
    return Service(
        name=name, state="waiting" if server.paused else "up", version=server.version, heartbeat_s=0.0, detail=detail
    )


# --- The run's files -------------------------------------------------------------------------------------------
def read_logs(run: RunFolder, record: RunRecord | None = None) -> dict[str, Log]:
    """Returns the end of each service's log, as the local launcher writes them. Leaves out an earlier run's lines.

    `record`: default is run.json.
    """
    record = run.record() if record is None else record
    since = None if record is None else record.created_at
    return {name: read_log(path, since) for name, path in run.logs(record).items()}


def free_bytes(folder: Path) -> int | None:
    """Returns the free space on the folder's disk, or None if it is unknown."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def read_files(run_id: str, roots: Sequence[Path], clock: Callable[[], float] = time.time) -> Facts:
    """Reads a run from its files. Works on a crashed run.

    Raises GristmillError `run_folder_missing` if no root has files of the run.
    """
    source = RunFolder.open(run_id, roots)
    now = clock()
    folders, record = source.folders, source.record()
    metrics, rows = source.own_file(METRICS_FILE, record), source.metrics(record)
    model = source.model(record)
    written = last_change(metrics) if metrics is not None else 0.0
    logs = read_logs(source, record)
    ages = {name: now - last_change(log.path) for name, log in logs.items()}
    last_sign = min([*ages.values(), *([now - written] if written else [])], default=None)
    speed = pace(rows)
    quiet = STALE_S if speed is None else max(STALE_S, 3 * speed.seconds_per_step)
    ended = bool(logs) and all(log.ended for log in logs.values())
    state = str(RunState.OPEN) if not ended and last_sign is not None and last_sign < quiet else STOPPED
    if record is not None and record.state == RunState.SUSPENDED:
        state = str(RunState.SUSPENDED)
    # The API may have ended before it wrote the end of the run; the finished model is the trainer's sign of it.
    finished = model is not None and last_change(model, *foreign.entries(model)) >= written - 1
    if finished or (record is not None and record.state == RunState.FINISHED):
        state = str(RunState.FINISHED)
    version = _label(rows[-1].get("policy_version")) if rows else None
    starting = not rows and state == RunState.OPEN
    return Facts(
        run=run_id,
        state=state,
        rows=rows,
        evaluations=list(_evaluations(source, record)),
        record=record,
        version=version,
        steps=_steps(record, logs, len(rows) if state == RunState.FINISHED else None),
        settings={} if record is None else settings_of(record),
        services=sorted(
            (_logged_service(name, log, ages[name], state, starting=starting) for name, log in logs.items()),
            key=lambda service: _ORDER.index(service.name) if service.name in _ORDER else len(_ORDER),
        ),
        dropped=_dropped(source, rows, record),
        receipts=source.receipts(record),
        warnings=[warning for log in logs.values() for warning in log.warnings][-20:],
        phase=next((log.phase for name in ("env", "trainer", "model") if (log := logs.get(name)) and log.phase), "")
        if starting
        else "",
        started=record.created_at
        if record is not None
        else min((log.started for log in logs.values() if log.started is not None), default=None),
        free_bytes=free_bytes(folders[0]),
        folders=folders,
    )


def _logged_service(name: str, log: Log, age: float, run_state: str, *, starting: bool) -> Service:
    finished = run_state == RunState.FINISHED
    state = "done" if finished else "up" if age < STALE_S and not log.ended else "down"
    detail = log.error if not finished else ""
    if not detail and state == "up" and (starting or name in ("trainer", "env")):
        detail = log.phase  # A model server logs the phases of its start again at every publication.
    return Service(name=name, state=state, heartbeat_s=max(age, 0.0), detail=detail)


def _evaluations(run: RunFolder, record: RunRecord | None) -> Iterator[dict[str, Any]]:
    """Yields what `serve` measured in this training, in order of steps. Their folders begin with a policy version.

    Evaluations with names are one row per version, whose figures begin with the name, as at the API.
    """
    evaluations: dict[tuple[str, str], dict[str, Any]] = {}
    for folder in run.folders:
        for path in (one / EVALUATION_RESULTS_FILE for one in foreign.entries(folder / EVALUATIONS_FOLDER)):
            version = re.match(r"(\d+)\.(\d+)-", path.parent.name)
            try:
                results = json.loads(foreign.read_file(path))
                row = {**results["figures"], "prompts": results["prompts"]}
                name = (results.get("settings") or {}).get("evaluation")
            except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
                continue  # not finished, or written by something else
            except foreign.ForeignFileError:
                continue
            if version is None or not run.made(path.parent, record):
                continue
            if name is not None:
                row = {f"{name}/{key}": value for key, value in row.items()}
            rows = evaluations.setdefault((version[0], path.parent.name if name is None else ""), {})
            rows |= row | {"step": int(version[2])}
    yield from sorted(evaluations.values(), key=lambda row: row["step"])


def _steps(record: RunRecord | None, logs: Mapping[str, Log], otherwise: int | None) -> int | None:
    if record is not None and record.training_steps is not None:
        return record.training_steps
    return next((log.steps for log in logs.values() if log.steps is not None), otherwise)


def _dropped(run: RunFolder, rows: Sequence[Mapping[str, Any]], record: RunRecord | None) -> dict[str, int]:
    """Returns the dropped groups by reason, from the API's drops.jsonl, else what the trainer rejected."""
    creation = None if record is None else record.created_ms
    reasons: dict[str, str] = {}
    for path in run.drops():
        for drop, _ in read_drops(path):
            if drop.what == "dropped" and creation in (None, drop.creation):
                reasons[drop.group_id] = drop.reason or "unknown"
    if reasons:
        return dict(Counter(reasons.values()))
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update(row.get("rejected", {}))
    return dict(counts)


def _label(version: str | None) -> str | None:
    """Returns a label of weights; None for other text."""
    try:
        return None if version is None else str(PolicyVersion.parse(version))
    except ValueError:
        return None


def find_run(client: SyncClient) -> str | None:
    """Returns the open run of the API, or else its newest run; None if the API has no run."""
    runs = client.runs()
    open_runs = [record for record in runs if record.state == RunState.OPEN]
    return (open_runs or runs)[0].run_id if runs else None
