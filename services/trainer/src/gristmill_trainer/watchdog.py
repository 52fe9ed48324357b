"""When no batch comes: who waits for whom."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from gristmill import RunStatus, SyncClient
from gristmill_trainer.errors import PublishError
from gristmill_trainer.publish.server import ModelServer

_LOG = logging.getLogger(__name__)

EVERY = 60.0
"""Seconds without a batch until the first word, and between two."""
# An environment asks anew at least every 20 s while it wants permits, and it renews what it holds.
_ASKS_WITHIN = 45.0


@dataclass(frozen=True)
class ServerState:
    """What one model server says at this moment."""

    url: str
    problem: str | None
    """Why it did not answer; None when it did."""
    paused: bool = False
    version: str = ""


def look_at(server: ModelServer) -> ServerState:
    """Ask a server, once."""
    try:
        server.call("GET", "/health", timeout=5.0)
        paused = bool(server.call("GET", "/is_paused", timeout=5.0).json()["is_paused"])
        version = str(server.call("GET", "/weight_info", timeout=5.0).json()["weight_version"])
    except PublishError as error:
        return ServerState(server.url, str(error))
    return ServerState(server.url, None, paused, version)


def diagnose(
    waited: float, needed: int, before: RunStatus | None, status: RunStatus, servers: list[ServerState], version: str
) -> str:
    """One line. `waited`: seconds; `needed`: groups of a step; `before`: the status of the last word, or of the start
    of the wait; `version`: the weights that the servers should serve."""
    head = f"no batch for {waited:.0f} s: {status.ready} of {needed} groups ready"
    return f"{head}; {_cause(before, status, servers, version)}"


def _cause(before: RunStatus | None, status: RunStatus, servers: list[ServerState], version: str) -> str:
    submitted = _ago("the last group came", status.last_submit_s, "no group ever came")
    if status.outstanding == 0 and (status.last_asked_s is None or status.last_asked_s > _ASKS_WITHIN):
        asked = _ago("the last request was", status.last_asked_s, "none ever did")
        return (
            f"no environment asks for permits ({asked}; {submitted}): start one, "
            "python -m gristmill_env --config CONFIG, or look at its log"
        )
    for server in servers:
        if server.problem is not None:
            return f"{_permits(status)} and {submitted}: {server.problem}"
        if server.paused:
            return (
                f"{_permits(status)} and {submitted}: the model server at {server.url} is paused; "
                f"POST {server.url}/resume lets it go on"
            )
        if server.version != version:
            return (
                f"{_permits(status)} and {submitted}: the model server at {server.url} serves version "
                f"{server.version}, not {version}; it was restarted, and is published to again"
            )
    dropped = _newly_dropped(before, status)
    if dropped and (before is None or status.accepted == before.accepted):
        told = ", ".join(f"{reason} {count}" for reason, count in sorted(dropped.items(), key=lambda pair: -pair[1]))
        return (
            f"every group that was generated is dropped ({told}): a reward that tells completions apart, or other rows"
        )
    if status.outstanding == 0:
        return (
            f"the environment asks for permits and gets none, and {submitted}: {status.accepted} groups are accepted, "
            f"{status.leased} of them leased; is another trainer of this run at work?"
        )
    if before is not None and status.accepted > before.accepted:
        return f"{_permits(status)}, {status.accepted - before.accepted} groups came meanwhile: generation is slow"
    return f"{_permits(status)} and {submitted}, and the model server answers: completions are long, or scoring hangs"


def _newly_dropped(before: RunStatus | None, status: RunStatus) -> dict[str, int]:
    known = {} if before is None else before.dropped
    news = {reason: count - known.get(reason, 0) for reason, count in status.dropped.items()}
    return {reason: count for reason, count in news.items() if count > 0}


def _permits(status: RunStatus) -> str:
    return f"the environment holds {status.outstanding} permits"


def _ago(what: str, seconds: float | None, never: str) -> str:
    return never if seconds is None else f"{what} {seconds:.0f} s ago"


class Watchdog:
    """Watches one wait after the other: `begin` it, then `look` whenever a poll came back empty."""

    def __init__(
        self,
        api: SyncClient,
        run_id: str,
        needed: int,
        servers: list[ModelServer],
        tell: Callable[[str], None] = _LOG.warning,
    ) -> None:
        """`needed`: groups of a step. `tell`: gets the line."""
        self._api = api
        self._run_id = run_id
        self._needed = needed
        self._servers = servers
        self._tell = tell
        self.begin()

    def begin(self) -> None:
        """A wait begins."""
        self._since = self._told = time.monotonic()
        self._before: RunStatus | None = None

    def look(self, version: str) -> None:
        """Say what holds the run up, if a minute went by since the last word. `version`: what should be served."""
        now = time.monotonic()
        if self._before is None:
            self._before = self._api.status(self._run_id)
        if now - self._told < EVERY:
            return
        status = self._api.status(self._run_id)
        states = [look_at(server) for server in self._servers]
        self._tell(diagnose(now - self._since, self._needed, self._before, status, states, version))
        self._told, self._before = now, status
