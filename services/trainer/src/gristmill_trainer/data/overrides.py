"""Overrides from an environment for a group or one of its sequences (Atropos' protocol).

`TrajectoryGroup.overrides` is {"sequences": [{...}, ...], "group": {...}}; both keys are optional. Known overrides:

    set_advantage_to_zero   bool; for a sequence or the group. The tokens stay in the batch and its counts. Only
                            penalties give them a gradient. The reward stays in the group's baseline.
    group_size              for the group: the environment uses it in its own check. The trainer ignores it.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gristmill import TrajectoryGroup
from gristmill_trainer.data.sample import Bool
from gristmill_trainer.errors import TrainerError

_LOG = logging.getLogger(__name__)
_ZERO = "set_advantage_to_zero"
_NOT_OURS = "group_size"


class OverridesError(TrainerError):
    """Overrides that cannot be applied."""


@dataclass(frozen=True, eq=False)
class Overrides:
    """A group's parsed overrides."""

    zeroed: Bool
    """bool[G]: sequences whose advantage is set to zero."""
    unknown: Counter[str]
    """Unknown keys and their counts."""


def read_overrides(group: TrajectoryGroup) -> Overrides:
    """Parses a group's overrides. Unknown keys are counted, and logged the first time.

    Raises OverridesError for a wrong type, and for a list of overrides that does not match the sequences.
    """
    zeroed = np.zeros(group.size, np.bool_)
    unknown: Counter[str] = Counter()
    if group.overrides is None:
        return Overrides(zeroed, unknown)
    found = _mapping(group.overrides, "overrides")
    unknown.update(found.keys() - {"sequences", "group"})
    zeroed |= _asks_for_zero(found.get("group"), "the group's overrides", unknown)
    sequences = found.get("sequences")
    if sequences is None:
        sequences = []
    if not isinstance(sequences, list):
        raise OverridesError(
            "wrong_type",
            f"the sequences' overrides are a {type(sequences).__name__}, not a list",
            field="the sequences' overrides",
        )
    asked = [_asks_for_zero(one, f"the overrides of sequence {index}", unknown) for index, one in enumerate(sequences)]
    zeroed |= _of_each(asked, group.size)
    for key in unknown:
        _tell(key)
    return Overrides(zeroed, unknown)


def _of_each(asked: Sequence[bool], size: int) -> Bool:
    if len(asked) == size:
        return np.array(asked, np.bool_)
    # Atropos accepts shorter lists: its environments omit sequences without overrides.
    if any(asked):
        raise OverridesError(
            "length_mismatch",
            f"{len(asked)} overrides for {size} sequences: it cannot be told whose they are",
            field="overrides",
        )
    return np.zeros(size, np.bool_)


def _asks_for_zero(overrides: Any, whose: str, unknown: Counter[str]) -> bool:
    if overrides is None:
        return False
    mapping = _mapping(overrides, whose)
    unknown.update(mapping.keys() - {_ZERO, _NOT_OURS})
    value = mapping.get(_ZERO)
    if value not in (None, False, True):
        raise OverridesError("wrong_type", f"{whose}: {_ZERO} is {value!r}, not true or false", field=whose)
    return bool(value)


def _mapping(value: Any, whose: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise OverridesError("wrong_type", f"{whose}: a {type(value).__name__}, not a mapping of names", field=whose)
    return value


@functools.lru_cache(maxsize=256)
def _tell(key: str) -> None:
    _LOG.warning("environments send the override %r, which is not known here and does nothing", key)
