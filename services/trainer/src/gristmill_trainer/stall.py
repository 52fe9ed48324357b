"""Ends a trainer that makes no progress, so that its restart policy starts it again and its leases run out.

The thread that extends leases would keep a trainer's groups for ever while its loop hangs: in a collective whose other
side is gone, in a driver's call, on a file system that does not answer.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_LOG = logging.getLogger(__name__)

EXIT_CODE: Final = 70
FLOOR = 1800.0
"""Seconds without progress that are never a stall: a first step may compile, a checkpoint may go to a slow disk."""
MULTIPLE: Final = 10
"""A stall is at least this many times the longest time between two signs of progress so far."""
FROZEN = 7200.0
"""Seconds after which a process ends in which no Python thread can run, as when C code hangs and holds the
interpreter's lock."""
_STDERR: Final = 2
"""Its file descriptor: faulthandler writes without the interpreter."""
_TICK = 1.0
# A tick counts for no more than this many seconds: a process that was stopped (SIGSTOP) has not hung.
_LONGEST_TICK = 5.0
# Seconds to report the stall. What hangs may be standard error itself.
_LAST_WORDS = 10.0


class StallGuard:
    """Watches the training loop from a thread of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle = self._longest = 0.0
        self._unwatched: str | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall-guard", daemon=True)
        self._thread.start()

    def progress(self) -> None:
        """The loop is at work: it began or ended a phase, a micro-batch or a poll."""
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
        armed = before = time.monotonic()
        faulthandler.dump_traceback_later(FROZEN, exit=True, file=_STDERR)
        while not self._closed.wait(_TICK):
            now = time.monotonic()
            with self._lock:
                self._idle += min(now - before, _LONGEST_TICK)
                idle, limit = self._idle, max(FLOOR, MULTIPLE * self._longest)
            before = now
            if now - armed > FROZEN / 4:
                faulthandler.dump_traceback_later(FROZEN, exit=True, file=_STDERR)
                armed = now
            if idle <= limit:
                continue
            if self._unwatched is None:
                _end(idle)
            _LOG.warning("%s has been running for %.0f s; the training waits for it", self._unwatched, idle)
            with self._lock:
                self._idle = 0.0


def _end(idle: float) -> None:
    """End the process at once: what hangs cannot be asked to stop."""
    threading.Timer(_LAST_WORDS, os._exit, [EXIT_CODE]).start()
    _LOG.critical(
        "no progress for %.0f s: the trainer ends with exit code %d, and continues from its last checkpoint when it is "
        "started again. Where its threads are:",
        idle,
        EXIT_CODE,
    )
    faulthandler.dump_traceback(all_threads=True, file=_STDERR)
    os._exit(EXIT_CODE)
