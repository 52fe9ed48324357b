"""What a transport of weights does."""

from __future__ import annotations

from typing import Protocol

from gristmill import PolicyVersion
from gristmill_trainer.policy import Policy


class WeightPublisher(Protocol):
    """Brings a policy's weights into the model server."""

    def publish(self, policy: Policy, version: PolicyVersion) -> None:
        """Return when the server answers with these weights under this version. Raises PublishError."""

    def ensure(self, version: PolicyVersion) -> None:
        """Publish the last weights again if the server no longer has them: it was restarted. Raises PublishError."""
