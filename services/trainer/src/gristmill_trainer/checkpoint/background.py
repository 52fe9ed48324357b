"""A checkpoint that a thread writes from a copy of the state, while the trainer takes its next steps."""

from __future__ import annotations

import threading
import time

from gristmill import GristmillError
from gristmill.errors import of_thread
from gristmill_trainer.checkpoint.contents import Progress
from gristmill_trainer.checkpoint.digests import DigestWriter
from gristmill_trainer.checkpoint.store import CheckpointStore
from gristmill_trainer.model_state import SavedState


class BackgroundSave:
    """Writes one checkpoint at a time, in a training of one process.

    The caller acks the checkpoint's groups when `poll` or `join` returns its step, because only then is it durable.
    Only one thread calls the methods.
    """

    def __init__(self, first_step: int = 0) -> None:
        """`first_step`: steps done before the training."""
        self.slowest = 0.0
        """Seconds of the slowest write."""
        self.durable: int | None = None
        """Step of the newest checkpoint that this process wrote."""
        self._begun = first_step
        """Step of the newest checkpoint that this process began, at first `first_step`."""
        self._step: int | None = None
        self._began = time.monotonic()
        """When the newest checkpoint began, at first when the training did."""
        self._thread: threading.Thread | None = None
        self._failure: GristmillError | None = None

    @property
    def pending(self) -> bool:
        """Whether a checkpoint was begun that neither `poll` nor `join` has returned."""
        return self._thread is not None

    @property
    def seconds_left(self) -> float:
        """Expected seconds until the checkpoint in progress is durable."""
        running = self._thread is not None and self._thread.is_alive()
        return max(0.0, self._began + self.slowest - time.monotonic()) if running else 0.0

    def is_due(self, step: int, interval: float | None) -> bool:
        """Whether to begin a checkpoint of `step` now, because after another step it could not be durable within
        `interval` seconds of the previous one. False while a thread writes, and without an interval."""
        steps = step - self._begun
        if interval is None or steps == 0 or (self._thread is not None and self._thread.is_alive()):
            return False
        since = time.monotonic() - self._began
        return since + since / steps + self.slowest >= interval

    def wrote(self, step: int, began: float) -> None:
        """Records a checkpoint that was written without this object. `began`: in `time.monotonic`'s seconds."""
        self._begun = self.durable = step
        self._began = began
        self.slowest = max(self.slowest, time.monotonic() - began)

    def begin(
        self, store: CheckpointStore, staged: SavedState, progress: Progress, digests: DigestWriter | None
    ) -> None:
        """Starts to write the checkpoint. Call `join` before.

        `staged`: a result of `LearnerState.staged`, which is not called again before `join`.
        """
        assert not self.pending, f"the checkpoint of step {self._step} is in progress"

        def write() -> None:
            try:
                store.save(staged, progress, digests)
            except Exception as error:  # noqa: BLE001  Raised by `join`: a full disk must not end the thread unheard.
                self._failure = of_thread(f"writing the checkpoint of step {progress.step}", error)
            self.slowest = max(self.slowest, time.monotonic() - self._began)

        self._begun = self._step = progress.step
        self._began = time.monotonic()
        self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()

    def poll(self) -> int | None:
        """Returns the step of the begun checkpoint, once, if it is durable; else None. Raises the thread's error."""
        return None if self._thread is not None and self._thread.is_alive() else self.join()

    def join(self) -> int | None:
        """Waits until the begun checkpoint is durable, and returns its step; None if there is none.

        Raises the errors of `CheckpointStore.save`. A stop request does not shorten the wait.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        step, self._step = self._step, None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if step is not None:
            self.durable = step
        return step
