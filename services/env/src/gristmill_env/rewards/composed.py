"""Rewards computed from other rewards: combined, r1, cascading_r1.

Each part is called like any reward of the run, and is a separate entry in the scores ("combined/accuracy"). If a part
fails on a completion, the composed reward fails on that completion, unless the part's weight is 0.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field

from gristmill_env.errors import RewardError
from gristmill_env.rewards.outcomes import Failure, Outcome, Outcomes
from gristmill_env.rewards.registry import reward
from gristmill_env.rewards.reward import CallableReward, Reward
from gristmill_env.settings.dataset import RewardSpec

Weight = Annotated[float, Field(allow_inf_nan=False)]


class Composed(ABC):
    """A reward that is computed from other rewards."""

    parts: Sequence[RewardSpec]

    def __call__(self) -> float | None:
        """Raises TypeError, because a composed reward has no inputs. Only its parts are called."""
        raise TypeError("a composed reward is computed from its parts")

    @abstractmethod
    def combine(self, parts: Mapping[str, Sequence[float | None]]) -> Sequence[float | None]:
        """Computes one value per completion. `parts`: a list of values over completions for each of `self.parts`."""


@dataclass(frozen=True)
class ComposedReward(Reward):
    """A reward computed from other rewards, each of which is called and shown separately."""

    parts: Mapping[str, Reward]
    """The parts by their names inside the composed reward."""
    metrics: frozenset[str]
    """Parts with weight 0. If such a part fails, the composed reward still has a value."""
    composed: Composed

    @property
    def asks_for(self) -> frozenset[str]:
        return frozenset().union(*(part.asks_for for part in self.parts.values()))

    def here(self) -> ComposedReward:
        return replace(self, parts={name: part.here() for name, part in self.parts.items()})

    def leaves(self) -> dict[str, CallableReward]:
        inner = [found for part in self.parts.values() for found in part.leaves().items()]
        return {f"{self.name}/{name}": leaf for name, leaf in inner}

    def outcomes(self, name: str, called: Mapping[str, Sequence[Outcomes]]) -> list[Outcomes]:
        inner = {short: part.outcomes(f"{name}/{short}", called) for short, part in self.parts.items()}
        columns = {short: [one[f"{name}/{short}"] for one in found] for short, found in inner.items()}
        results: list[Outcomes] = [{name: outcome} for outcome in self._combined(name, columns)]
        for found in inner.values():
            for result, outcomes in zip(results, found, strict=True):
                result |= outcomes
        return results

    def _combined(self, name: str, columns: Mapping[str, Sequence[Outcome]]) -> list[Outcome]:
        """Returns the outcomes of the whole. A part's failure on a completion is the whole's outcome there."""
        size = len(next(iter(columns.values())))
        failures = [self._failure(columns, at) for at in range(size)]
        good = [at for at in range(size) if failures[at] is None]
        values: dict[str, list[float | None]] = {}
        for short, column in columns.items():
            values[short] = [item if isinstance(item := column[at], float) else None for at in good]
        outcomes: list[Outcome] = list(failures)
        for at, value in zip(good, self.composed.combine(values) if good else [], strict=True):
            overflows = value is not None and not math.isfinite(value)
            value = value if value is None else float(value)
            outcomes[at] = Failure(name, "its sum overflows", "sum_overflows") if overflows else value
        return outcomes

    def _failure(self, columns: Mapping[str, Sequence[Outcome]], at: int) -> Failure | None:
        for short, column in columns.items():
            if short not in self.metrics and isinstance(failure := column[at], Failure):
                return failure
        return None


def has_value_in_part(column: Sequence[Outcome]) -> bool:
    """Whether a reward returned None for some completions of a prompt and a value for others."""
    return None in column and any(isinstance(item, float) for item in column)


def weighted_sum(values: Iterable[tuple[float, float | None]]) -> float | None:
    """Returns Σ weight × value over (weight, value) pairs with a nonzero weight and a value. None without such a pair.

    The sum is rounded once, so that the order of rewards does not matter. An overflow gives infinity.
    """
    products = [weight * value for weight, value in values if weight != 0 and value is not None]
    try:
        return math.fsum(products) if products else None
    except (OverflowError, ValueError):  # ValueError: the products contain both infinities
        return math.inf


@reward("combined")
class Combined(Composed):
    """The weighted sum of other rewards.

    Options: `rewards`, names or {type, weight, params, name}; `normalization`: `none`; `sum` divides by the sum of
    the weights, of those parts that have a value; `minmax` first brings each part to 0..1 over the completions of a
    prompt, (value − min) / (max − min), where a part that is the same for all counts as 0.5.
    """

    def __init__(
        self,
        *,
        rewards: Annotated[list[str | RewardSpec], Field(min_length=1)],
        normalization: Literal["none", "sum", "minmax"] = "none",
    ) -> None:
        self.parts = [RewardSpec(type=item) if isinstance(item, str) else item for item in rewards]
        self._normalization = normalization
        if all(part.weight == 0 for part in self.parts):
            raise RewardError(
                "all_weights_zero",
                "reward 'combined': all of its rewards have weight 0; nothing is left to add up",
                reward="combined",
            )
        if normalization == "sum" and any(part.weight < 0 for part in self.parts):
            raise RewardError(
                "negative_weight",
                "reward 'combined': a weight is negative; a weighted mean does not exist, use none or minmax",
                reward="combined",
            )

    def combine(self, parts: Mapping[str, Sequence[float | None]]) -> list[float | None]:
        """Sum them up, completion by completion."""
        columns = list(parts.values())
        if self._normalization == "minmax":
            columns = [_to_unit(column) for column in columns]
        partly = [
            part.weight != 0 and self._normalization != "sum" and has_value_in_part(column)
            for part, column in zip(self.parts, columns, strict=True)
        ]
        return [
            None if any(p and value is None for p, value in zip(partly, values, strict=True)) else self._sum(values)
            for values in zip(*columns, strict=True)
        ]

    def _sum(self, values: Sequence[float | None]) -> float | None:
        weights = [part.weight for part in self.parts]
        total = weighted_sum(zip(weights, values, strict=True))
        if total is None or self._normalization != "sum":
            return total
        said = weighted_sum((w, None if value is None else 1.0) for w, value in zip(weights, values, strict=True))
        assert said is not None
        return total / said


@reward("r1")
class R1(Combined):
    """format_weight × format + accuracy_weight × accuracy.

    Options: the two weights.
    """

    def __init__(self, *, format_weight: Weight = 0.5, accuracy_weight: Weight = 1.0) -> None:
        if format_weight == accuracy_weight == 0:
            raise RewardError(
                "all_weights_zero", "reward 'r1': both of its weights are 0; nothing is left to add up", reward="r1"
            )
        super().__init__(
            rewards=[
                RewardSpec(type="format", weight=format_weight),
                RewardSpec(type="accuracy", weight=accuracy_weight),
            ]
        )


@reward("cascading_r1")
class CascadingR1(Composed):
    """accuracy where the format holds, else 0; a right answer earns steps_bonus × reasoning_steps on top.

    The format is the strict one: exactly one think block, first, and something after it. So a right answer in the
    wrong shape is worth no more than a wrong one, and steps of reasoning pay only when they lead to the answer.

    Options: `steps_bonus`, most that the steps may add.
    """

    def __init__(self, *, steps_bonus: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1) -> None:
        self._bonus = steps_bonus
        self.parts = [
            RewardSpec(type="format", params={"strict": True}),
            RewardSpec(type="accuracy"),
            RewardSpec(type="reasoning_steps", weight=steps_bonus),
        ]

    def combine(self, parts: Mapping[str, Sequence[float | None]]) -> list[float | None]:
        """Stage by stage, completion by completion. No value where accuracy has none."""
        return [self._cascade(*values) for values in zip(*parts.values(), strict=True)]

    def _cascade(self, shaped: float | None, right: float | None, steps: float | None) -> float | None:
        if right is None:
            return None
        if not shaped:
            return 0.0
        return right + (self._bonus * (steps or 0.0) if right > 0 else 0.0)


def _to_unit(column: Sequence[float | None]) -> Sequence[float | None]:
    said = [value for value in column if value is not None]
    if not said:
        return column
    # Halves, because the difference of two large numbers may overflow. Those of the smallest numbers are 0.
    low = min(said) / 2
    span = max(said) / 2 - low
    return [None if value is None else (value / 2 - low) / span if span else 0.5 for value in column]
