"""Scores a completion with all the rewards of a run, and adds them up by weight."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real

from gristmill_env.errors import RewardError
from gristmill_env.rewards.registry import Reward
from gristmill_env.rewards.sample import Sample, Score

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WeightedReward:
    """One line of `reward_functions`."""

    reward: Reward
    weight: float


class Scorer:
    """The rewards of a run.

    Three outcomes a reward: a score; None, which leaves the sum (its weight with it); an error, which
    is logged and makes the whole sample unscored. An error is never a silent 0: a 0 would teach.
    """

    def __init__(self, rewards: Iterable[WeightedReward], *, has_answer: bool) -> None:
        """Raises RewardError when there is no reward, one appears twice, or one needs an answer that rows lack."""
        self.rewards = tuple(rewards)
        names = [weighted.reward.name for weighted in self.rewards]
        if not names:
            raise RewardError("reward_functions is empty; name at least one reward")
        if twice := {name for name in names if names.count(name) > 1}:
            raise RewardError(f"reward_functions lists {', '.join(sorted(twice))} twice; once is enough")
        needy = [weighted.reward.name for weighted in self.rewards if weighted.reward.needs_answer]
        if needy and not has_answer:
            raise RewardError(f"reward '{needy[0]}' compares with the row's answer; set dataset.answer_field")

    @property
    def names(self) -> list[str]:
        """Names of the rewards, in the order of the configuration."""
        return [weighted.reward.name for weighted in self.rewards]

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Score a group's completions. Never raises for what a reward does."""
        return await asyncio.to_thread(lambda: [self._score(sample) for sample in samples])

    def _score(self, sample: Sample) -> Score:
        parts: dict[str, float | None] = {}
        failure: str | None = None
        for weighted in self.rewards:
            name = weighted.reward.name
            try:
                parts[name] = _checked(weighted.reward.score(sample))
            except Exception as error:  # a reward is the user's code: its failure is counted, and ends its group only
                logger.exception("reward %r failed", name)
                parts[name], failure = None, f"{name}: {type(error).__name__}: {error}"
        valued = [w.weight * value for w in self.rewards if (value := parts[w.reward.name]) is not None]
        total = math.fsum(valued) if valued and failure is None else None
        return Score(total=total, parts=parts, error=failure)


def _checked(value: object) -> float | None:
    if value is None:
        return None
    if not isinstance(value, Real) or not math.isfinite(value):
        raise RewardError(f"a reward returns a finite number or None, not {value!r}")
    return float(value)
