"""A publisher that does nothing, for a model server that must not be updated."""

from __future__ import annotations

from gristmill import PolicyVersion
from gristmill_trainer.publish.base import Tensors


class NonePublisher:
    """Never updates the server. Completions become more off-policy with every step; importance weights correct this."""

    def publish(self, tensors: Tensors, version: PolicyVersion) -> None:
        """Does nothing."""

    def ensure(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""
