"""From groups to optimizer steps."""

from __future__ import annotations

from pydantic import Field, model_validator

from gristmill.settings import Settings


class BatchingSettings(Settings):
    """How much goes into a step, and how it is cut up."""

    batch_size: int = Field(default=8, ge=1)
    """Sequences a micro-batch. A step takes batch_size x gradient_accumulation_steps sequences."""
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    """Micro-batches an optimizer step."""
    seq_len: int | None = Field(default=None, ge=2)
    """Longest sequence, in tokens; what is beyond is not trained on. Default: the server's longest."""
    token_budget: int | None = Field(default=None, ge=2)
    """Most tokens that go through the model at once, instead of batch_size sequences; a longer sequence is dropped
    and counted. It changes memory and speed, and no result."""
    packing: bool = True
    """Sequences lie one after the other in a row, without padding, and attend to themselves only. false: padded rows,
    for models whose attention cannot do that."""
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

    @model_validator(mode="after")
    def _budget_holds_a_sequence(self) -> BatchingSettings:
        if self.token_budget is not None and self.seq_len is not None and self.token_budget < self.seq_len:
            raise ValueError(f"token_budget ({self.token_budget}) must hold one sequence of seq_len ({self.seq_len})")
        return self
