"""Stop requests: SIGTERM and SIGINT, and the grace period after them. SIGHUP becomes SIGTERM."""

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
# Long enough for a reset connection; the rest of the grace period is for the checkpoint.
_PATIENCE_STOPPING = 5.0


def torchrun_grace(environ: Mapping[str, str]) -> float:
    """Returns the seconds between torchrun's signal and its kill, less 10 seconds for the shutdown."""
    return max(0.0, float(environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")) - 10.0)


def leave_to_rank_0() -> None:
    """Ignores stop signals on this rank. Rank 0 handles them, and needs the other ranks for its last checkpoint."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@cache
def _leave_forks_alone() -> None:
    """Restores default signal handlers in forked processes, such as a hook's pool.

    A signal to a forked process then ends only that process, and does not stop the trainer.
    """

    of_thread = threading.local()

    def begin() -> None:
        of_thread.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # A signal during the fork waits.

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
    """Records SIGTERM and SIGINT. The loop checks for a request between steps, and in steps that it can abandon."""

    def __init__(self, grace: float, *, torchrun: bool = False) -> None:
        """`grace`: seconds from the signal to the end. `torchrun`: torchrun started the trainer, and kills it then."""
        self.grace = grace
        # A second signal ends the process at once. Under torchrun, it may be a forwarded copy of the first.
        self._second = signal.SIG_IGN if torchrun else signal.SIG_DFL
        self.asked_at: float | None = None
        """Time of the request (time.monotonic()), or None."""
        for number in _SIGNALS:
            signal.signal(number, self._note)
        self._watch()
        _leave_forks_alone()

    @property
    def requested(self) -> bool:
        return self.asked_at is not None

    @property
    def seconds_left(self) -> float:
        """Seconds left of the grace period; infinite without a stop request."""
        return float("inf") if self.asked_at is None else self.asked_at + self.grace - time.monotonic()

    def patience(self) -> float:
        """Returns the seconds to retry an unresponsive API or model server. A stop request shortens them."""
        return max(0.0, min(_PATIENCE_STOPPING, self.seconds_left)) if self.requested else _PATIENCE

    @contextmanager
    def stop_on_timeout(self) -> Iterator[None]:
        """Converts ApiUnreachable and PublishError to StoppedError if a stop was requested."""
        try:
            yield
        except (ApiUnreachable, PublishError) as error:
            if not self.requested:
                raise
            raise StoppedError(
                "stopped",
                f"stopped on request; the next start continues from the last checkpoint. {error}",
                problem=error.code,
            ) from error

    def should_abandon(self, expected_seconds: float) -> bool:
        """Whether to abandon the current step.

        `expected_seconds`: expected time for the rest of the step and its checkpoint.
        """
        return expected_seconds > self.seconds_left

    def raise_if_requested(self) -> None:
        if self.requested:
            raise StoppedError(
                "stopped", "stopped on request; start the trainer again to continue from the last checkpoint"
            )

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked_at is None:
            self.asked_at = time.monotonic()
        for each in _SIGNALS:
            signal.signal(each, self._second)

    def _watch(self) -> None:
        """Starts a thread that records the arrival time of a signal.

        The signal handler runs in the main thread, possibly only after a backward pass. That time is part of the grace.
        """
        here, there = socket.socketpair()
        there.setblocking(False)
        signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)

        def listen() -> None:
            while number := here.recv(1):
                if number[0] in (*_SIGNALS, signal.SIGHUP) and self.asked_at is None:
                    self.asked_at = time.monotonic()

        self._ends = there  # Keep the socket open while signals are written to it.
        threading.Thread(target=listen, name="signals", daemon=True).start()
