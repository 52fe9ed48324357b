"""Diagnosis of a missing batch: which part of the run waits for which."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from gristmill import RunStatus, SyncClient
from gristmill.receipts import UNPROVEN
from gristmill_trainer.errors import PublishError
from gristmill_trainer.publish.servers import ModelServer

_LOG = logging.getLogger(__name__)

EVERY = 60.0
"""Seconds without a batch until the first message, and between messages."""
# An environment that needs permits repeats its request at least every 20 s, and renews the permits that it holds.
_ASKS_WITHIN = 45.0


@dataclass(frozen=True)
class ServerState:
    """Current state of one model server."""

    url: str
    problem: PublishError | None
    """Why the server did not answer, or None."""
    paused: bool = False
    version: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """The cause of a delayed step: a stable code and a sentence."""

    code: str
    message: str


@dataclass(frozen=True)
class Wanted:
    """The batch that a step waits for."""

    amount: int
    unit: Literal["groups", "sequences"] = "groups"
    """sequences: for Atropos environments, which do not ask for permits."""
    published: bool = True
    """Whether this trainer publishes its weights to the servers. Otherwise the servers may serve any version."""


def check_server(server: ModelServer) -> ServerState:
    """Asks a server once for its health, paused state and weight version."""
    try:
        server.call("GET", "/health", timeout=5.0)
        paused = bool(server.ask("GET", "/is_paused", "is_paused", timeout=5.0))
        version = str(server.ask("GET", "/weight_info", "weight_version", timeout=5.0))
    except PublishError as error:
        return ServerState(server.url, error)
    return ServerState(server.url, None, paused, version)


def diagnose(
    waited: float,
    wanted: Wanted,
    before: RunStatus | None,
    status: RunStatus,
    servers: list[ServerState],
    version: str,
    publishing: bool = False,
) -> Diagnosis:
    """Returns the cause of the delay, with a message of one line.

    `waited`: seconds. `before`: the status at the last message, or at the start of the wait. `version`: the version
    that the servers should serve. `publishing`: a publication of that version is in progress.
    """
    ready = status.ready if wanted.unit == "groups" else status.sequences.get("ready", 0)
    head = f"no batch for {waited:.0f} s: {ready} of {wanted.amount} {wanted.unit} ready"
    cause = _cause(wanted, before, status, servers, version, publishing)
    return Diagnosis(cause.code, f"{head}; {cause.message}")


def _cause(
    wanted: Wanted,
    before: RunStatus | None,
    status: RunStatus,
    servers: list[ServerState],
    version: str,
    publishing: bool,
) -> Diagnosis:
    permits = wanted.unit == "groups"
    submitted = _ago("the last group came", status.last_submit_s, "no group ever came")
    if permits and status.outstanding == 0 and (status.last_asked_s is None or status.last_asked_s > _ASKS_WITHIN):
        asked = _ago("the last request was", status.last_asked_s, "none ever did")
        return Diagnosis(
            "no_environment",
            f"no environment asks for permits ({asked}; {submitted}): start one, "
            "python -m gristmill_env --config CONFIG, or look at its log",
        )
    so_far = f"the environment holds {status.outstanding} permits and {submitted}" if permits else submitted
    for server in servers:
        problem = _problem(server, version if wanted.published else None, publishing)
        if problem is not None:
            return Diagnosis(problem.code, f"{so_far}: {problem.message}")
    dropped = _newly_dropped(before, status)
    came = 0 if before is None else status.accepted - before.accepted
    if (many := sum(dropped.values())) > came:
        counts = ", ".join(f"{reason} {count}" for reason, count in sorted(dropped.items(), key=lambda pair: -pair[1]))
        return Diagnosis(
            "groups_dropped",
            f"{many} of {many + came} generated groups are dropped ({counts}): choose other rows, or a reward that "
            "differs between the completions of a prompt",
        )
    if permits and status.outstanding == 0:
        return Diagnosis(
            "no_permits",
            f"the environment asks for permits and gets none, and {submitted}: {status.accepted} groups are accepted, "
            f"{status.leased} of them leased; is another trainer of this run at work?",
        )
    if came:
        return Diagnosis(
            "generation_slow",
            f"{so_far}, {came} groups came meanwhile: generation is slow",
        )
    advice = "completions are long, or scoring hangs" if permits else "look at the log of the environments of Atropos'"
    return Diagnosis("no_groups_come", f"{so_far}, and the model server answers: {advice}")


def _problem(server: ServerState, version: str | None, publishing: bool) -> Diagnosis | None:
    """Returns the problem of one server, or None. `version`: the version it should serve; None allows any version."""
    if server.problem is not None:
        return Diagnosis(server.problem.code, str(server.problem))
    other = version is not None and server.version != version
    if publishing and (server.paused or other):
        return Diagnosis("publishing", f"version {version} is being published to the model server at {server.url}")
    if server.paused:
        return Diagnosis(
            "model_server_paused",
            f"the model server at {server.url} is paused; POST {server.url}/resume lets it go on",
        )
    if other and server.version == UNPROVEN:
        return Diagnosis(
            "receipt_failed",
            f"the model server at {server.url} does not serve the weights that were published and is left out; "
            "receipts.jsonl in the run's folder names the cause",
        )
    if other:
        return Diagnosis(
            "other_version_served",
            f"the model server at {server.url} serves version {server.version}, not {version}; it was restarted, and "
            "is published to again",
        )
    return None


def _newly_dropped(before: RunStatus | None, status: RunStatus) -> dict[str, int]:
    known = {} if before is None else before.dropped
    news = {reason: count - known.get(reason, 0) for reason, count in status.dropped.items()}
    return {reason: count for reason, count in news.items() if count > 0}


def _ago(what: str, seconds: float | None, never: str) -> str:
    return never if seconds is None else f"{what} {seconds:.0f} s ago"


class Watchdog:
    """Watches consecutive waits: call `begin` for each wait, then `check` after each empty poll."""

    def __init__(
        self,
        api: SyncClient,
        run_id: str,
        wanted: Wanted,
        servers: Iterable[ModelServer],
        report: Callable[[str], None] = _LOG.warning,
    ) -> None:
        """`report`: receives the message."""
        self._api = api
        self._run_id = run_id
        self._wanted = wanted
        self._servers = servers
        self._report = report
        self.begin()

    def begin(self) -> None:
        """Starts a wait."""
        self._since = self._reported = time.monotonic()
        self._before: RunStatus | None = None

    def check(self, version: str, publishing: bool) -> None:
        """Reports what delays the run, if a minute passed since the last message.

        `version`: the version that should be served; `publishing`: its publication is in progress.
        """
        now = time.monotonic()
        if self._before is None:
            self._before = self._api.status(self._run_id)
        if now - self._reported < EVERY:
            return
        status = self._api.status(self._run_id)
        states = [check_server(server) for server in self._servers]
        waited = now - self._since
        found = diagnose(waited, self._wanted, self._before, status, states, version, publishing)
        self._report(f"[{found.code}] {found.message}")
        self._reported, self._before = now, status
