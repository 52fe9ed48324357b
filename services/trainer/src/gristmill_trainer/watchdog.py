"""Logs, once per minute without a batch, why the step waits, by the rules of gristmill.internal.trouble."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from gristmill import RunStatus, SyncClient
from gristmill.internal import connections
from gristmill.internal.trouble import Live, ServerFacts, Trouble, by_importance, delays, groups_dropped, read_server
from gristmill_trainer.publish.servers import ModelServer

_LOG = logging.getLogger(__name__)

EVERY = 60.0
"""Seconds without a batch until the first message, and between messages."""
_SERVER_TIMEOUT = 5.0


@dataclass(frozen=True)
class Wanted:
    """The batch that a step waits for."""

    amount: int
    unit: Literal["groups", "sequences"] = "groups"
    """sequences: for Atropos environments, which do not ask for permits."""
    published: bool = True
    """Whether this trainer publishes its weights to the servers. Otherwise the servers may serve any version."""


def diagnose(
    waited: float,
    wanted: Wanted,
    before: RunStatus | None,
    status: RunStatus,
    servers: Sequence[ServerFacts],
    version: str,
    publishing: bool = False,
) -> Trouble:
    """Returns the cause of the delay, whose text is one line.

    `waited`: seconds. `before`: the status at the last message, or at the start of the wait. `version`: the version
    that the servers should serve. `publishing`: a publication of that version is in progress.
    """
    atropos = wanted.unit == "sequences"
    live = Live(
        status=status,
        version=version,
        starving=True,
        servers=servers,
        atropos=atropos,
        publishes=wanted.published,
        publishing=publishing,
        waited_s=waited,
    )
    status_before = before or status
    dropped, came = Counter(status.dropped) - Counter(status_before.dropped), status.accepted - status_before.accepted
    found = by_importance([*delays(live), *groups_dropped(dropped, came, least=1)])
    cause = found[0] if found else Trouble.of("generation_slow", f"{came} groups came meanwhile: generation is slow")
    ready = status.sequences.get("ready", 0) if atropos else status.ready
    permits = "" if atropos else f", environments hold {status.outstanding} permits"
    last = status.last_submit_s
    submitted = "no group ever came" if last is None else f"the last group came {last:.0f} s ago"
    head = f"no batch for {waited:.0f} s: {ready} of {wanted.amount} {wanted.unit} ready{permits}, {submitted}"
    return Trouble(cause.code, f"{head}; {cause.text}", cause.remedy)


class Watchdog:
    """Watches consecutive waits: call `begin` for each wait, then `check` after each empty poll."""

    def __init__(self, api: SyncClient, run_id: str, wanted: Wanted, servers: Iterable[ModelServer]) -> None:
        self._api = api
        self._run_id = run_id
        self._wanted = wanted
        self._servers = servers
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
        servers = [ask(server.url) for server in self._servers]
        trouble = diagnose(now - self._since, self._wanted, self._before, status, servers, version, publishing)
        _LOG.warning("[%s] %s. %s", trouble.code, trouble.text, trouble.remedy)
        self._reported, self._before = now, status


def ask(url: str) -> ServerFacts:
    """Asks a server once for its paused state and weight version."""
    with connections.client(url, timeout=_SERVER_TIMEOUT) as http:
        return read_server(url, http)
