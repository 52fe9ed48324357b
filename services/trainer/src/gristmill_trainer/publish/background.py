"""Publishing while the next step trains."""

from __future__ import annotations

import threading
from collections.abc import Callable

from gristmill import GristmillError, PolicyVersion
from gristmill_trainer.errors import of_thread
from gristmill_trainer.publish.base import Tensors, WeightPublisher


class BackgroundPublisher:
    """Runs one publication at a time in a thread, on a copy of the weights; the trainer goes on.

    For runs whose environment may be a step behind (max_staleness > 0): a synchronous one would only wait elsewhere.
    An error is raised by the next call of any method here.
    """

    def __init__(self, publisher: WeightPublisher, published: Callable[[PolicyVersion], object]) -> None:
        """`published` is called in the thread once a version is served, as to tell the API."""
        self._publisher = publisher
        self._published = published
        self._thread: threading.Thread | None = None
        self._failure: GristmillError | None = None

    def publish(self, tensors: Tensors, version: PolicyVersion) -> None:
        """Copy the tensors and return. Waits first for the publication before: versions only go forward."""
        self.wait()
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        self._thread = threading.Thread(target=self._run, args=(copies, version), name="publish", daemon=True)
        self._thread.start()

    def ensure(self, version: PolicyVersion) -> None:
        """As the publisher's own; while a publication is under way there is nothing to look after."""
        if self._thread is not None and self._thread.is_alive():
            return
        self.wait()
        self._publisher.ensure(version)

    def wait(self) -> None:
        """Return when the last publication is served and told. Raises what it failed of."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        self._publisher.close()

    def _run(self, tensors: Tensors, version: PolicyVersion) -> None:
        try:
            self._publisher.publish(tensors, version)
            self._published(version)
        except Exception as error:  # Raised by the next call: a full disk must not end the thread unheard.
            self._failure = of_thread(f"publishing version {version}", error)
