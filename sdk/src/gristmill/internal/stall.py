"""Ends a service that makes no progress, so that its restart policy starts it again.

The thread that extends leases would keep a trainer's groups for ever while the trainer's loop hangs. The loop can hang
in a collective whose other side is gone, in a driver's call, or on a file system that does not answer. An environment
with a blocked event loop answers nothing, not even a signal to stop.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

_LOG = logging.getLogger(__name__)

EXIT_CODE: Final = 70
_STDERR: Final = 2
"""File descriptor of standard error. faulthandler writes to it without the interpreter."""
_TICK = 1.0
# Maximum seconds that one tick adds to the idle time, because a process that was stopped (SIGSTOP) has not hung.
_LONGEST_TICK = 5.0
# Seconds to report the stall. The report has a limit because standard error itself may hang.
_LAST_WORDS = 10.0


@dataclass(frozen=True)
class StallLimits:
    """Limits for the time without progress. Times are in seconds."""

    floor: float
    """Minimum time without progress that counts as a stall."""
    frozen: float
    """Time after which a process ends if none of its Python threads can run. C code that hangs while it holds the
    interpreter's lock is an example."""
    multiple: float = 0
    """A stall is at least this many times the longest time between two signs of progress so far."""


class StallGuard:
    """Watches the loop of a service from another thread."""

    def __init__(self, service: str, limits: StallLimits) -> None:
        """`service`: the name in the last log line, such as "trainer"."""
        self._service = service
        self._limits = limits
        self._lock = threading.Lock()
        self._idle = self._longest = 0.0
        self._unwatched: str | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall-guard", daemon=True)
        self._thread.start()

    def progress(self) -> None:
        """Records that the loop runs: the loop began or ended a phase, a micro-batch or a poll."""
        with self._lock:
            self._longest = max(self._longest, self._idle)
            self._idle = 0.0

    @contextmanager
    def unwatched(self, what: str) -> Iterator[None]:
        """Only logs stalls inside the block. Use it for code without a time limit, such as a user's function."""
        self._unwatched = what
        try:
            yield
        finally:
            self._unwatched = None
            with self._lock:
                self._idle = 0.0

    def close(self) -> None:
        """Stops watching."""
        self._closed.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        limits = self._limits
        armed = before = time.monotonic()
        faulthandler.dump_traceback_later(limits.frozen, exit=True, file=_STDERR)
        while not self._closed.wait(_TICK):
            now = time.monotonic()
            with self._lock:
                self._idle += min(now - before, _LONGEST_TICK)
                idle, limit = self._idle, max(limits.floor, limits.multiple * self._longest)
            before = now
            if now - armed > limits.frozen / 4:
                faulthandler.dump_traceback_later(limits.frozen, exit=True, file=_STDERR)
                armed = now
            if idle <= limit:
                continue
            if self._unwatched is None:
                _end(self._service, idle)
            _LOG.warning("%s has been running for %.0f s; the training waits for it", self._unwatched, idle)
            with self._lock:
                self._idle = 0.0


def _end(service: str, idle: float) -> None:
    """Ends the process at once, because a loop that hangs cannot react to a request to stop."""
    threading.Timer(_LAST_WORDS, os._exit, [EXIT_CODE]).start()
    _LOG.critical(
        "no progress for %.0f s: the %s ends with exit code %d, and continues the run when it is started again. "
        "Where its threads are:",
        idle,
        service,
        EXIT_CODE,
    )
    faulthandler.dump_traceback(all_threads=True, file=_STDERR)
    os._exit(EXIT_CODE)
