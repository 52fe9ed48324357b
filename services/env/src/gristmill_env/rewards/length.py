"""The simplest reward that teaches: say more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from gristmill_env.rewards.registry import reward


@reward("length")
def length(tokens: Sequence[int], *, target_tokens: Annotated[int, Field(gt=0)] = 128) -> float:
    """Rises in a straight line from 0 for no token to 1 at `target_tokens`, and stays there."""
    return min(1.0, len(tokens) / target_tokens)
