"""Hyperparameters that a run may also set at its top level, under the names that users of Atropos know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic_core import PydanticCustomError

TOP_LEVEL: Final = {
    "total_steps": "training_steps",
    "max_batches_offpolicy": "max_staleness",
    "batch_size": "batch_size",
}
"""Top-level name to the name in the `trainer:` block. A top-level batch_size counts the sequences of a whole step."""


def trainer_block(
    block: Mapping[str, Any], *, total_steps: int | None, batch_size: int | None, max_batches_offpolicy: int | None
) -> dict[str, Any]:
    """Returns the run's `trainer:` block with the hyperparameters of the top level added.

    `batch_size`: sequences per optimizer step. The block counts sequences per micro-batch, so this is divided by the
    block's gradient_accumulation_steps; without that key one micro-batch takes the whole step, whatever trainer.yaml
    says. Raises PydanticCustomError, a ValueError, if the two places contradict each other.
    """
    whole = dict(block)
    for name, here in (("total_steps", total_steps), ("max_batches_offpolicy", max_batches_offpolicy)):
        there = TOP_LEVEL[name]
        if here is None:
            continue
        if whole.get(there, here) != here:
            raise PydanticCustomError(
                "values_contradict",
                "{name} is {here} but trainer.{there} is {other}; keep one",
                {"name": name, "here": here, "there": there, "other": str(whole[there])},
            )
        whole[there] = here
    if batch_size is None:
        return whole
    steps = whole.setdefault("gradient_accumulation_steps", 1)
    if not isinstance(steps, int) or steps < 1:
        raise PydanticCustomError(
            "not_a_positive_integer",
            "trainer.gradient_accumulation_steps is {steps}; it is a whole number from 1",
            {"steps": repr(steps)},
        )
    if batch_size % steps:
        raise PydanticCustomError(
            "batch_not_divisible",
            "batch_size is {batch_size} sequences a step, which cannot be split into "
            "trainer.gradient_accumulation_steps = {steps} micro-batches; change one",
            {"batch_size": batch_size, "steps": steps},
        )
    if whole.get("batch_size", batch_size // steps) != batch_size // steps:
        raise PydanticCustomError(
            "values_contradict",
            "batch_size is {batch_size} sequences a step, but trainer.batch_size x gradient_accumulation_steps is "
            "{other} x {steps}; keep one",
            {"batch_size": batch_size, "other": str(whole["batch_size"]), "steps": steps},
        )
    whole["batch_size"] = batch_size // steps
    return whole
