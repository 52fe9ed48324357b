"""A reward for shorter completions, along a cosine curve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from gristmill_env.rewards.registry import reward


@reward("cosine_length")
def cosine_length(
    tokens: Sequence[int],
    *,
    max_tokens: Annotated[int, Field(gt=0)],
    min_reward: float = 0.0,
    max_reward: float = 1.0,
) -> float:
    """Falls along half a cosine from `max_reward` for no token to `min_reward` at `max_tokens`, and stays there.

    min + (max - min) / 2 * (1 + cos(pi * min(n / L, 1))) with n tokens and L = max_tokens; bounds given
    the wrong way round are swapped. The curve is CosFn of Yeo et al., "Demystifying Long
    Chain-of-Thought Reasoning in LLMs" (2025), arXiv:2502.03373, which has other bounds for right answers
    than for wrong ones. This looks at length alone: by itself it teaches silence, so give it a small
    weight beside a reward for being right.
    """
    low, high = sorted((min_reward, max_reward))
    return low + (high - low) / 2 * (1 + math.cos(math.pi * min(len(tokens) / max_tokens, 1.0)))
