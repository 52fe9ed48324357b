"""Stopping on request."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from types import FrameType

from gristmill_trainer.errors import TrainerError

GRACE = 50.0
"""Seconds from the signal to the end. compose.yaml kills after stop_grace_period, 60; ten are for a checkpoint that
takes longer than the last one and for the way out."""


def torchrun_grace(environ: Mapping[str, str]) -> float:
    """Seconds that torchrun leaves its processes after a signal, less those for the way out."""
    return max(0.0, float(environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")) - 10.0)


def leave_to_rank_0() -> None:
    """A request to stop reaches all ranks. Rank 0 answers it, and needs the others for its last checkpoint; they end
    with it."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


class StoppedError(TrainerError):
    """The trainer was asked to stop before the run's end; the run resumes from the last checkpoint."""


class StopRequest:
    """Notes SIGTERM and SIGINT; the loop asks at points where nothing is half-done, or where it can be thrown away."""

    def __init__(self, grace: float = GRACE, *, torchrun: bool = False) -> None:
        """`grace`: seconds that the trainer has from the signal on. `torchrun`: which kills after them by itself."""
        self._grace = grace
        self._torchrun = torchrun
        self.asked_at: float | None = None
        """When it was asked, by time.monotonic()."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    @property
    def requested(self) -> bool:
        return self.asked_at is not None

    @property
    def seconds_left(self) -> float:
        """Of the grace; infinite while nobody asked."""
        return float("inf") if self.asked_at is None else self.asked_at + self._grace - time.monotonic()

    def should_abandon(self, expected_seconds: float) -> bool:
        """Whether what is in hand, and would take so much longer with the checkpoint after it, must be thrown away."""
        return expected_seconds > self.seconds_left

    def raise_if_requested(self) -> None:
        if self.requested:
            raise StoppedError("stopped on request; start the trainer again to go on from the last checkpoint")

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked_at = time.monotonic()
        # A second signal ends the process at once. Under torchrun it may be the first once more, sent on.
        signal.signal(number, signal.SIG_IGN if self._torchrun else signal.SIG_DFL)
