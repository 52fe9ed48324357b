"""The next batch is leased, checked and weighed while this one trains."""

from __future__ import annotations

import queue
import threading

from gristmill import GristmillError
from gristmill_trainer.errors import of_thread
from gristmill_trainer.feed import Batch, Prepare
from gristmill_trainer.leases import Leases

# Seconds of one long-poll for groups; closing waits for it at most.
_POLL = 5.0


class Prefetch:
    """Leases the batches of steps `first` to `last` in order, one ahead of who takes them.

    Worth its thread only when max_staleness > 0: in a synchronous run the next groups do not exist before the step is
    published. A step that is skipped or trained on fewer groups is a step all the same: the next is the next number.
    """

    def __init__(self, leases: Leases, groups: int, prepare: Prepare, first: int, last: int) -> None:
        """`groups`: of one step."""
        self._leases = leases
        self._groups = groups
        self._prepare = prepare
        self._steps = range(first, last + 1)
        self._ready: queue.Queue[Batch] = queue.Queue(maxsize=1)
        self._wanted = threading.Semaphore(1)
        self._closed = threading.Event()
        self._failure: GristmillError | None = None
        self._thread = threading.Thread(target=self._lease, name="prefetch", daemon=True)
        self._thread.start()

    def get(self, step: int, wait: float) -> Batch | None:
        """That of `step`, the next; None when it is not there after `wait` seconds. Raises what leasing failed of."""
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
        """End the thread and give back what nobody took."""
        self._closed.set()
        self._wanted.release()
        self._thread.join()
        while not self._ready.empty():
            self._leases.give_back(self._ready.get_nowait().step)

    def _lease(self) -> None:
        try:
            for step in self._steps:
                self._wanted.acquire()
                groups = None
                while groups is None:
                    if self._closed.is_set():
                        return
                    groups = self._leases.take(step, self._groups, _POLL)
                batch = Batch(step, groups, self._prepare)
                _ = batch.prepared  # here and now, not when the step begins
                self._ready.put(batch)
        except Exception as error:  # noqa: BLE001  Raised where groups are asked for: the loop would wait for them for ever.
            self._failure = of_thread("leasing the next step's groups", error)
