"""A penalty that grows before the length limit: DAPO's soft overlong punishment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from gristmill_env.rewards.registry import reward

_PAPERS_SHARE = 5


@reward("soft_overlong")
def soft_overlong(
    tokens: Sequence[int],
    *,
    max_tokens: Annotated[int, Field(gt=0)],
    cache_tokens: Annotated[int, Field(gt=0)] | None = None,
) -> float:
    """0 while there is room, then down in a straight line to -1 at `max_tokens`, and -1 beyond.

    With n tokens, L = max_tokens and c = cache_tokens: 0 for n <= L - c, (L - c - n) / c for
    L - c < n <= L, -1 for n > L. Equation 13 of Yu et al., "DAPO" (2025), arXiv:2503.14476.

    Options: `max_tokens`, which should be no more than dataset.max_tokens, else it is never reached;
    `cache_tokens`, the stretch before it in which the penalty grows, at most all of `max_tokens`. Unset,
    it is a fifth of `max_tokens`, as in the paper (4096 of 20480).
    """
    cache = min(cache_tokens or max(1, max_tokens // _PAPERS_SHARE), max_tokens)
    over = len(tokens) - (max_tokens - cache)
    return -min(over / cache, 1.0) if over > 0 else 0.0
