"""A reward for longer completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from gristmill_env.rewards.registry import reward


@reward("length")
def length(
    tokens: Sequence[int],
    *,
    target_tokens: Annotated[int, Field(gt=0)] = 128,
    min_reward: float = 0.0,
    max_reward: float = 1.0,
) -> float:
    """Rises in a straight line from `min_reward` for no token to `max_reward` at `target_tokens`, and stays there.

    Bounds given the wrong way round are swapped. To hold length down instead, see `soft_overlong` and
    `cosine_length`.
    """
    low, high = sorted((min_reward, max_reward))
    return low + (high - low) * min(1.0, len(tokens) / target_tokens)
