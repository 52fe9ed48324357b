"""A penalty for repeated n-grams."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gristmill_env.rewards.registry import reward


@reward("repetition_penalty")
def repetition_penalty(
    completion: str,
    *,
    ngram_size: Annotated[int, Field(gt=0)] = 3,
    max_penalty: Annotated[float, Field(le=0)] = -1.0,
    threshold: Annotated[float, Field(ge=0, le=1)] = 0.05,
) -> float:
    """(1 - unique / total) * `max_penalty` over the text's n-grams of words: 0 for none repeated.

    Words are what stands between spaces, without regard to case. A text of fewer than `ngram_size` words
    has no n-gram and no penalty: a short answer is never punished for being short. Nor is a share of
    repeated n-grams up to `threshold`, for some repetition is good style. After the n-gram repetition
    penalty of Yeo et al. (2025), arXiv:2502.03373, appendix C.2, taken over the whole completion.
    """
    words = completion.lower().split()
    total = len(words) - ngram_size + 1
    if total < 1:
        return 0.0
    unique = len({tuple(words[start : start + ngram_size]) for start in range(total)})
    repeated = 1 - unique / total
    return repeated * max_penalty if repeated > threshold else 0.0
