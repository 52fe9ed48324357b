"""Ends a service that makes no progress, so that its restart policy starts it again.

The thread that extends leases would keep a trainer's groups for ever while its loop hangs: in a collective whose other
side is gone, in a driver's call, on a file system that does not answer. An environment whose event loop is blocked
answers nothing, not even a signal to stop.
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
"""Its file descriptor: faulthandler writes without the interpreter."""
_TICK = 1.0
# A tick counts for no more than this many seconds: a process that was stopped (SIGSTOP) has not hung.
_LONGEST_TICK = 5.0
# Seconds to report the stall. What hangs may be standard error itself.
_LAST_WORDS = 10.0


@dataclass(frozen=True)
class StallLimits:
    """How long a service may show no progress. Times are in seconds."""

    floor: float
    """No shorter time is a stall."""
    frozen: float
    """Time after which a process ends in which no Python thread can run, as when C code hangs and holds the
    interpreter's lock."""
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
        """The loop runs: it began or ended a phase, a micro-batch or a poll."""
        with self._lock:
            self._longest = max(self._longest, self._idle)
            self._idle = 0.0

    @contextmanager
    def unwatched(self, what: str) -> Iterator[None]:
        """Within, code runs that may take as long as it likes, such as a function of the user's. It is only logged."""
        self._unwatched = what
        try:
            yield
        finally:
            self._unwatched = None
            with self._lock:
                self._idle = 0.0

    def close(self) -> None:
        """Stop watching."""
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
    """End the process at once: a loop that hangs cannot be asked to stop."""
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
