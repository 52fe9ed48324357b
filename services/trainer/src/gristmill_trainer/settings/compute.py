"""Where and how it is computed. No result depends on these beyond rounding, but for what `token_budget` drops."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gristmill.settings import Settings


class ComputeSettings(Settings):
    """Device, memory, speed."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA where there is one."""
    token_budget: int | None = Field(default=None, ge=2)
    """Most tokens that go through the model at once, instead of batch_size sequences; a longer sequence is dropped
    and counted. For the others it changes memory and speed, and no result."""
    packing: bool = True
    """Sequences lie one after the other in a row, without padding, and attend to themselves only. false: padded rows,
    for models whose attention cannot do that."""
    gradient_checkpointing: bool = False
    """Layers are computed again in the backward pass, rather than kept: less memory, more time."""
    compile: bool = False
    """The model's layers go through torch.compile."""
    peak_tflops: float | None = Field(default=None, gt=0)
    """What MFU is a share of. Default: the device's, where it is known."""
