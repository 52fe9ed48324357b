"""Stopping on request."""

from __future__ import annotations

import signal
from types import FrameType

from gristmill_trainer.errors import TrainerError


class StoppedError(TrainerError):
    """The trainer was asked to stop before the run's end; the run resumes from the last checkpoint."""


class StopRequest:
    """Notes SIGTERM and SIGINT; the loop asks at points where nothing is half-done."""

    def __init__(self) -> None:
        self.requested = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def raise_if_requested(self) -> None:
        if self.requested:
            raise StoppedError("stopped on request; start the trainer again to go on from the last checkpoint")

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        # A second signal ends the process at once.
        signal.signal(number, signal.SIG_DFL)
