"""What the store must know of a trainer's settings: how many groups a step takes and how many steps there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from gristmill_api import errors


@dataclass(frozen=True)
class TrainerPlan:
    groups_per_step: int
    training_steps: int
    max_staleness: int

    @classmethod
    def read(cls, trainer: Mapping[str, Any], group_size: int) -> TrainerPlan:
        """From the trainer's half of a run record. batch_size counts sequences; a step takes batch_size x
        gradient_accumulation_steps of them, which must be whole groups. Raises ApiProblem (422 bad_config)."""
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


def extends(old: Mapping[str, Any], new: Mapping[str, Any], planned: int | None = None) -> bool:
    """Whether trainer settings are the old ones with more training steps. `planned`: the old ones if `old` has none."""
    before, after = old.get("training_steps", planned), new.get("training_steps")
    if not (_is_integer(before) and _is_integer(after) and after > before):
        return False
    return {**old, "training_steps": after} == dict(new)


def env_extends(old: Mapping[str, Any], new: Mapping[str, Any], planned: int | None) -> bool:
    """`extends`, for an environment's settings with the trainer's under the key `trainer`."""
    if {**old, "trainer": None} != {**new, "trainer": None}:
        return False
    blocks = [settings.get("trainer") or {} for settings in (old, new)]
    return all(isinstance(block, Mapping) for block in blocks) and extends(blocks[0], blocks[1], planned)


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(trainer: Mapping[str, Any], name: str, least: int) -> int:
    value = trainer.get(name)
    if not _is_integer(value) or value < least:
        raise errors.bad_config(f"the trainer's {name} must be a whole number of at least {least}, not {value!r}.")
    return value
