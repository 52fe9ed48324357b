"""Settings of the trainer that stand at the top level of a run, under the names that users of Atropos know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def trainer_block(
    block: Mapping[str, Any], *, total_steps: int | None, batch_size: int | None, max_batches_offpolicy: int | None
) -> dict[str, Any]:
    """The run's `trainer:` block with what the top level says of it.

    `batch_size`: sequences an optimizer step. The trainer counts them by micro-batch, so it is divided by the block's
    gradient_accumulation_steps; where the block has none it is 1, whatever trainer.yaml says.
    Raises ValueError when the two places contradict each other.
    """
    whole = dict(block)
    for name, here, there in (
        ("total_steps", total_steps, "training_steps"),
        ("max_batches_offpolicy", max_batches_offpolicy, "max_staleness"),
    ):
        if here is None:
            continue
        if whole.get(there, here) != here:
            raise ValueError(f"{name} is {here} but trainer.{there} is {whole[there]}; keep one")
        whole[there] = here
    if batch_size is None:
        return whole
    steps = whole.setdefault("gradient_accumulation_steps", 1)
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"trainer.gradient_accumulation_steps is {steps!r}; it is a whole number from 1")
    if batch_size % steps:
        raise ValueError(
            f"batch_size is {batch_size} sequences a step, which cannot be split into "
            f"trainer.gradient_accumulation_steps = {steps} micro-batches; change one"
        )
    if whole.get("batch_size", batch_size // steps) != batch_size // steps:
        raise ValueError(
            f"batch_size is {batch_size} sequences a step, but trainer.batch_size x gradient_accumulation_steps is "
            f"{whole['batch_size']} x {steps}; keep one"
        )
    whole["batch_size"] = batch_size // steps
    return whole
