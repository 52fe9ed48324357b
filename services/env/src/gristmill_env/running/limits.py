"""How long a call may take."""

from __future__ import annotations

from dataclasses import dataclass

from gristmill_env.errors import EnvError


class CallError(EnvError):
    """A call gave no result: it exceeded its limits, or blocked its event loop."""


@dataclass(frozen=True)
class Limits:
    """How long a call may take. Other work on the machine does not use up a call's processor time."""

    cpu: float
    """Seconds of processor time. A call that computes for longer has overrun."""
    wall: float
    """Elapsed seconds, for a call that sleeps or waits for an event that never happens."""

    def overrun(self, cpu: float | None, wall: float) -> CallError | None:
        """Returns the error of a call that took this many seconds; None if the call is within its limits.

        `cpu`: seconds of processor time; None if unknown. `wall`: elapsed seconds."""
        if cpu is not None and cpu > self.cpu:
            return CallError(
                "call_overran", f"it took longer than {self.cpu:g} s of processor time", limit="cpu", seconds=self.cpu
            )
        if wall > self.wall:
            return CallError("call_overran", f"it took longer than {self.wall:g} s", limit="wall", seconds=self.wall)
        return None
