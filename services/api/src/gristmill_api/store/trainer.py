"""What the store must know of a trainer's settings: how many groups a step takes and how many steps there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gristmill_api import errors


@dataclass(frozen=True)
class TrainerPlan:
    groups_per_step: int
    training_steps: int
    max_staleness: int

    @classmethod
    def read(cls, trainer: Mapping[str, Any], group_size: int) -> TrainerPlan:
        """From the trainer's half of a run record. batch_size counts sequences; a step takes batch_size x
        gradient_accumulation_steps of them, which must be whole groups. Raises Refused (422 bad_config)."""
        batch_size = _integer(trainer, "batch_size", 1)
        accumulation = _integer(trainer, "gradient_accumulation_steps", 1)
        sequences = batch_size * accumulation
        if sequences % group_size:
            raise errors.bad_config(
                f"batch_size {batch_size} x gradient_accumulation_steps {accumulation} = {sequences} sequences a step, "
                f"which is not divisible by the run's group_size {group_size}."
            )
        return cls(
            groups_per_step=sequences // group_size,
            training_steps=_integer(trainer, "training_steps", 1),
            max_staleness=_integer(trainer, "max_staleness", 0),
        )


def _integer(trainer: Mapping[str, Any], name: str, least: int) -> int:
    value = trainer.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise errors.bad_config(f"the trainer's {name} must be a whole number of at least {least}, not {value!r}.")
    return value
