"""The interface of weight publishers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from gristmill import PolicyVersion

Tensors = Mapping[str, torch.Tensor]
"""All tensors with the server's names and shapes, including the head; or an adapter's tensors with the names of peft's
files."""


class WeightPublisher(Protocol):
    """Publishes weights to one or more model servers."""

    def publish(self, tensors: Tensors, version: PolicyVersion) -> None:
        """Returns when these weights are served under this version. Raises PublishError."""

    def ensure(self) -> None:
        """Publishes the last weights again to restarted servers. Does not wait: call it regularly.

        Raises PublishError.
        """

    def close(self) -> None:
        """Ends the background work."""
