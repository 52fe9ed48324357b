"""Scores one completion with the reward of a given name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gristmill_env.rewards import Sample, create_reward


def scored(name: str, params: Mapping[str, Any] | None = None, completion: str = "", **inputs: Any) -> float | None:
    """Returns the reward's score of one completion. Raises RewardError."""
    return create_reward(name, params).score(Sample(completion, **inputs))


def scored_length(name: str, tokens: int, **params: Any) -> float:
    """Returns the reward's score of a completion of this many tokens."""
    value = scored(name, params, tokens=[7] * tokens)
    assert value is not None
    return value
