"""What a transport of weights does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from gristmill import PolicyVersion

Tensors = Mapping[str, torch.Tensor]
"""Every tensor under the name and with the shape that the server holds it by, its head written out; or those of an
adapter, under the names of peft's files."""


class WeightPublisher(Protocol):
    """Brings weights into the model server, or into several."""

    def publish(self, tensors: Tensors, version: PolicyVersion) -> None:
        """Return when these weights are served under this version. Raises PublishError."""

    def ensure(self) -> None:
        """See that the last weights are published again where a server no longer has them: it was restarted. Waits for
        none: call again. Raises PublishError."""

    def close(self) -> None:
        """End what works in the background."""
