"""Scorers that are closed afterwards, and rewards that hang until then."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from tests.unit.env.rewards.running.misbehaving import Make, Waiting

from gristmill_env.rewards import Execution, Scorer, WeightedReward, create_reward
from gristmill_env.running.limiter import Limits


@pytest.fixture
async def scorer() -> AsyncIterator[Make]:
    """Makes a scorer of rewards, each of weight 1."""
    made: list[Scorer] = []

    def make(*rewards: Callable[..., Any], timeout: float = 60.0, limits: Limits | None = None) -> Scorer:
        weighted = [WeightedReward(create_reward(function), 1.0) for function in rewards]
        made.append(Scorer(weighted, has_answer=True, execution=Execution(limits or Limits(timeout, timeout))))
        return made[-1]

    yield make
    for one in made:
        await one.close()


@pytest.fixture
def waiting() -> Any:
    made = Waiting()
    yield made
    made.let_go.set()
