"""No transport: for a model server that may not be updated."""

from __future__ import annotations

from gristmill import PolicyVersion
from gristmill_trainer.publish.base import Tensors


class NonePublisher:
    """Leaves the server alone. Its completions grow more off-policy with every step; the importance weight corrects."""

    def publish(self, tensors: Tensors, version: PolicyVersion) -> None:
        """Do nothing."""

    def ensure(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
