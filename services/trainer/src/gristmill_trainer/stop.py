"""Stopping on request."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import FrameType

from gristmill import ApiUnreachable
from gristmill_trainer.errors import PublishError, TrainerError

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_PATIENCE = 600.0
# Enough for a connection that was reset; the rest of the grace is for the checkpoint.
_PATIENCE_STOPPING = 5.0


def torchrun_grace(environ: Mapping[str, str]) -> float:
    """Seconds that torchrun leaves its processes after a signal, less those for the way out."""
    return max(0.0, float(environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")) - 10.0)


def leave_to_rank_0() -> None:
    """A request to stop reaches all ranks. Rank 0 answers it, and needs the others for its last checkpoint; they end
    with it."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@cache
def _leave_forks_alone() -> None:
    """What is asked of a fork, as of a hook's pool of processes, is not asked of the trainer: it ends, as is usual."""

    of_thread = threading.local()

    def begin() -> None:
        of_thread.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # one that comes at once waits

    def parent() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, of_thread.mask)

    def child() -> None:
        signal.set_wakeup_fd(-1)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        parent()

    os.register_at_fork(before=begin, after_in_parent=parent, after_in_child=child)


class StoppedError(TrainerError):
    """The trainer was asked to stop before the run's end; the run resumes from the last checkpoint."""


class StopRequest:
    """Notes SIGTERM and SIGINT; the loop asks at points where nothing is half-done, or where it can be thrown away."""

    def __init__(self, grace: float, *, torchrun: bool = False) -> None:
        """`grace`: seconds that the trainer has from the signal on. `torchrun`: which kills after them by itself."""
        self.grace = grace
        # A second signal ends the process at once. Under torchrun it may be the first once more, sent on.
        self._second = signal.SIG_IGN if torchrun else signal.SIG_DFL
        self.asked_at: float | None = None
        """When it was asked, by time.monotonic()."""
        for number in _SIGNALS:
            signal.signal(number, self._note)
        self._watch()
        _leave_forks_alone()

    @property
    def requested(self) -> bool:
        return self.asked_at is not None

    @property
    def seconds_left(self) -> float:
        """Of the grace; infinite while nobody asked."""
        return float("inf") if self.asked_at is None else self.asked_at + self.grace - time.monotonic()

    def patience(self) -> float:
        """Seconds to try on for an API or a model server that does not answer: few once the end is near."""
        return max(0.0, min(_PATIENCE_STOPPING, self.seconds_left)) if self.requested else _PATIENCE

    @contextmanager
    def cutting_short(self) -> Iterator[None]:
        """Within, nobody answering is StoppedError where it was a request to stop that ended the patience."""
        try:
            yield
        except (ApiUnreachable, PublishError) as error:
            if not self.requested:
                raise
            raise StoppedError(
                "stopped",
                f"stopped on request; the next start goes on from the last checkpoint. {error}",
                problem=error.code,
            ) from error

    def should_abandon(self, expected_seconds: float) -> bool:
        """Whether what is in hand, and would take so much longer with the checkpoint after it, must be thrown away."""
        return expected_seconds > self.seconds_left

    def raise_if_requested(self) -> None:
        if self.requested:
            raise StoppedError(
                "stopped", "stopped on request; start the trainer again to go on from the last checkpoint"
            )

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked_at is None:
            self.asked_at = time.monotonic()
        for each in _SIGNALS:
            signal.signal(each, self._second)

    def _watch(self) -> None:
        """Note a signal when it comes. Its handler runs in the main thread, after the backward pass that this may be
        in: the seconds of that are of the grace, too."""
        here, there = socket.socketpair()
        there.setblocking(False)
        signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)

        def listen() -> None:
            while number := here.recv(1):
                if number[0] in _SIGNALS and self.asked_at is None:
                    self.asked_at = time.monotonic()

        self._ends = there  # open as long as signals are written to it
        threading.Thread(target=listen, name="signals", daemon=True).start()
