"""From groups to optimizer steps."""

from __future__ import annotations

from pydantic import Field

from gristmill.settings import Settings


class BatchingSettings(Settings):
    """How much goes into a step, and how it is cut up."""

    batch_size: int = Field(default=8, ge=1)
    """Sequences a micro-batch. A step takes batch_size x gradient_accumulation_steps sequences."""
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    """Micro-batches an optimizer step."""
    seq_len: int | None = Field(default=None, ge=2)
    """Longest sequence, in tokens; what is beyond is not trained on. Default: the server's longest."""
    num_epochs: int = Field(default=1, ge=1)
    """Times that a step's batch is gone through; the old policy is that before the first."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer updates that each pass over the batch is cut into."""

    @property
    def sequences_per_step(self) -> int:
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates on one batch; more than one needs the old policy's log-probabilities."""
        return self.num_epochs * self.minibatches
