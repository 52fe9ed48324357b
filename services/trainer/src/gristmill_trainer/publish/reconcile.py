"""Decides the next action for one model server, without a thread, a clock or a request.

Each server should serve the target version and prove it. `ServerState` is what the trainer knows of one server.
`next_action` compares it with the target version. pool.py carries the action out; `begun` and `after` return the new
state. So a server that was restarted, joined late or missed publications needs no rule of its own: its state differs
from the target version, and the next action loads this version.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from gristmill import PolicyVersion
from gristmill_trainer.errors import PublishError

PAUSE = 0.5
"""Seconds between two attempts at a server that does not answer or did not load the weights."""
RECEIPT_FAILED = "receipt_failed"
"""Code of the error of a server that does not serve the weights, although they were published to it twice."""
_NEVER = float("inf")

ActionResult = PolicyVersion | PublishError | None
"""Of an action: the target version, if the server has it; None if the server has other weights; or the problem."""


class Action(StrEnum):
    REST = "rest"
    """Nothing, until the target version changes or `ServerState.seconds_of_rest` have passed."""
    LOAD = "load"
    """Publish the target version to the server."""
    CHECK = "check"
    SLEEP = "sleep"
    """Let the server sleep until its next load."""
    PROVE = "prove"
    """Ask for the proof that the server computes with the target version."""


@dataclass(frozen=True)
class Target:
    """The version that every server should serve."""

    path: Path
    version: PolicyVersion
    provable: bool
    """Whether the servers can be asked for the proof of this version."""
    sleep: int = 0
    """Level of vLLM's sleep that every server should be in; 0: awake."""


@dataclass(frozen=True)
class ServerState:
    """What the trainer knows of one server. All times are of one monotonic clock, in seconds."""

    served: PolicyVersion | None = None
    """The published version that the server has, by its last answer; None if it has none or its last action failed."""
    proven: bool = False
    """Whether the server proved `served`."""
    asleep: bool = False
    """Whether the server sleeps. It computes nothing before its next load."""
    falls_asleep: bool = False
    """Whether a request to sleep is in progress."""
    problem: PublishError | None = None
    """Why the last action failed."""
    away_since: float | None = None
    """Since when no publication waits for the server: its actions fail, or the present action takes too long."""
    due: float = _NEVER
    """When to try again after a failure; when to check the label of a server without a failure."""

    def left_out(self, version: PolicyVersion) -> bool:
        """Whether the server failed the proof of `version`. It gets no more requests until the next version."""
        return self.served == version and self.problem is not None and self.problem.code == RECEIPT_FAILED

    def ready(self, version: PolicyVersion, *, proven: bool) -> bool:
        """Whether the server computes with `version`, and has proven it if `proven`."""
        awake = self.served == version and self.problem is None and not (self.asleep or self.falls_asleep)
        return awake and (self.proven or not proven)

    def next_action(self, target: Target, now: float) -> Action:
        """Returns the action that brings the server closer to `target`."""
        goes_to_sleep = target.sleep > 0 and not self.asleep
        if self.left_out(target.version):
            return Action.SLEEP if goes_to_sleep else Action.REST
        if self.problem is not None and now < self.due:
            return Action.REST
        if self.served != target.version or (self.asleep and not target.sleep):
            return Action.LOAD
        if now >= self.due:
            return Action.CHECK
        if goes_to_sleep:
            return Action.SLEEP
        return Action.PROVE if target.provable and not self.proven and not self.asleep else Action.REST

    def seconds_of_rest(self, now: float) -> float | None:
        """Returns the seconds until `next_action` may return another action for the same version; None: never."""
        return self.due - now if now < self.due < _NEVER else None

    def check_at(self, time: float) -> ServerState:
        """Requests a check of the label, unless no version is known to be on the server."""
        return self if self.served is None else replace(self, due=time)

    def behind(self, now: float) -> ServerState:
        """The present action takes too long to wait for it."""
        return self if self.away_since is not None else replace(self, away_since=now)

    def begun(self, action: Action) -> ServerState:
        """Returns the state while `action` is in progress."""
        if action is not Action.LOAD:
            return replace(self, due=_NEVER, falls_asleep=action is Action.SLEEP)
        failed = self.problem if self.served is None else None  # A failed proof concerned the version before.
        return replace(self, proven=False, problem=failed, due=_NEVER)

    def after(self, action: Action, version: PolicyVersion, outcome: ActionResult, now: float) -> ServerState:
        """Returns the state after `action` for `version`."""
        if isinstance(outcome, PublishError):
            if outcome.code == RECEIPT_FAILED:
                return ServerState(version, problem=outcome, away_since=self.away_since, due=now)
            since = now if self.away_since is None else self.away_since
            return ServerState(problem=outcome, away_since=since, due=now + PAUSE)
        if outcome is None:
            return ServerState(away_since=self.away_since)
        if action is Action.LOAD:
            # It answers every earlier request for a check. The proof of a version follows its load without a check: a
            # server that kept other weights under another label has to fail the proof, not to be published to for ever.
            return ServerState(outcome)
        if action is Action.SLEEP:
            return replace(self, asleep=True, falls_asleep=False)
        proven = action is Action.PROVE or self.proven
        return ServerState(outcome, proven=proven, asleep=self.asleep, due=self.due)
