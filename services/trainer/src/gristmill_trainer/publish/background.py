"""Publication in the background, while the next step trains."""

from __future__ import annotations

import threading
from collections.abc import Callable

from gristmill import GristmillError, PolicyVersion
from gristmill_trainer.errors import of_thread
from gristmill_trainer.publish.base import Tensors, WeightPublisher
from gristmill_trainer.stop import StopRequest


class BackgroundPublisher:
    """Runs one publication at a time in a thread, on a copy of the weights, while the trainer continues.

    For runs whose environment may be a step behind (max_staleness > 0). A synchronous run would only wait elsewhere.
    `publish`, `ensure` or `wait` raises the error of the thread.
    """

    def __init__(
        self, publisher: WeightPublisher, published: Callable[[PolicyVersion], object], stop: StopRequest
    ) -> None:
        """`published`: called in the thread once a version is served, as to notify the API. `stop`: shortens waits."""
        self._publisher = publisher
        self._published = published
        self._stop = stop
        self._thread: threading.Thread | None = None
        self._failure: GristmillError | None = None

    def publish(self, tensors: Tensors, version: PolicyVersion) -> None:
        """Copies the tensors and starts their publication. First waits for the previous one, as versions only rise."""
        self.wait()
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        self._thread = threading.Thread(target=self._run, args=(copies, version), name="publish", daemon=True)
        self._thread.start()

    @property
    def publishing(self) -> bool:
        """Whether a publication is in progress."""
        return self._thread is not None and self._thread.is_alive()

    def ensure(self) -> None:
        """Calls `ensure` of the wrapped publisher, unless a publication is in progress."""
        if self.publishing:
            return
        self.wait()
        self._publisher.ensure()

    def wait(self) -> None:
        """Returns when the last publication is served and announced.

        Raises the error of the publication, or StoppedError if a stop is requested meanwhile.
        """
        if self._thread is not None:
            while self.publishing:
                self._thread.join(timeout=1.0)
                if self.publishing:
                    self._stop.raise_if_requested()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        """Waits within the grace period for the publication in progress, then closes the wrapped publisher."""
        if self._thread is not None:
            self._thread.join(timeout=max(0.0, min(self._stop.seconds_left, self._stop.grace)))
        self._publisher.close()

    def _run(self, tensors: Tensors, version: PolicyVersion) -> None:
        try:
            self._publisher.publish(tensors, version)
            self._published(version)
        except Exception as error:  # noqa: BLE001  Raised by the next call: a full disk must not end the thread unheard.
            self._failure = of_thread(f"publishing version {version}", error)
