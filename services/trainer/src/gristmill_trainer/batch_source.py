"""Sources of a step's batch: leased on demand, or prefetched one step ahead while the current step trains."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from gristmill import GristmillError, LeaseSession, TrajectoryGroup
from gristmill.errors import of_thread
from gristmill_trainer.data.samples import Prepared

# Seconds of one long-poll for groups; `close` waits at most for one poll.
_POLL = 5.0

Prepare = Callable[[int, list[TrajectoryGroup]], Prepared]
"""Makes the samples of an optimizer step from its number and its groups."""


@dataclass
class Batch:
    """The groups and samples of an optimizer step."""

    step: int
    groups: list[TrajectoryGroup]
    prepare: Prepare

    @cached_property
    def prepared(self) -> Prepared:
        """Samples of the step, computed at the first access."""
        return self.prepare(self.step, self.groups)


class BatchSource:
    """The batches of optimizer steps, in order. Leases a step's groups on demand."""

    def __init__(self, session: LeaseSession, prepare: Prepare) -> None:
        self._session = session
        self._prepare = prepare

    def get(self, step: int, wait: float) -> Batch | None:
        """Returns the batch of `step`; None if its groups are not ready after `wait` seconds."""
        groups = self._session.lease(step, wait)
        return None if groups is None else Batch(step, groups, self._prepare)

    def close(self) -> None:
        """Gives back groups that were leased ahead."""


class Prefetch(BatchSource):
    """Leases the batches of steps `first` to `last` in order, one step ahead of the caller of `get`.

    Useful only with max_staleness > 0: in a synchronous run the next groups do not exist before the step is published.
    Skipped steps, and steps trained on fewer groups, take a step number like any other step.
    """

    def __init__(self, session: LeaseSession, prepare: Prepare, first: int, last: int) -> None:
        super().__init__(session, prepare)
        self._steps = range(first, last + 1)
        self._ready: queue.Queue[Batch] = queue.Queue(maxsize=1)
        self._wanted = threading.Semaphore(1)
        self._closed = threading.Event()
        self._failure: GristmillError | None = None
        self._thread = threading.Thread(target=self._lease, name="prefetch", daemon=True)
        self._thread.start()

    def get(self, step: int, wait: float) -> Batch | None:
        """Returns the batch of `step`, the next step, or None after `wait` seconds. Raises the error of the thread."""
        try:
            batch = self._ready.get(timeout=wait)
        except queue.Empty:
            if self._failure is not None:
                raise self._failure from None
            return None
        assert batch.step == step, f"step {step} is asked for, and {batch.step} is the next"
        self._wanted.release()
        return batch

    def close(self) -> None:
        """Ends the thread and gives back batches that `get` never returned."""
        self._closed.set()
        self._wanted.release()
        self._thread.join()
        while not self._ready.empty():
            self._session.give_back(self._ready.get_nowait().step)

    def _lease(self) -> None:
        try:
            for step in self._steps:
                self._wanted.acquire()
                groups = None
                while groups is None:
                    if self._closed.is_set():
                        return
                    groups = self._session.lease(step, _POLL)
                batch = Batch(step, groups, self._prepare)
                _ = batch.prepared  # Prepare the batch in this thread.
                self._ready.put(batch)
        except Exception as error:  # noqa: BLE001  Raised where groups are asked for: the loop would wait for them for ever.
            self._failure = of_thread("leasing the next step's groups", error)
