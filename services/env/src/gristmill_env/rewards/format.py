"""A reward for the required tags in a completion."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from gristmill_env.rewards.registry import reward


@reward("format")
def format_tags(
    completion: str,
    *,
    preferred_tags: Annotated[tuple[str, ...], Field(min_length=1)] = ("think", "answer"),
    require_all_tags: bool = False,
    case_sensitive: bool = False,
    strict: bool = False,
) -> float:
    """1 if the completion has a nonempty pair of the preferred tags (`<answer>25</answer>`), else 0.

    `require_all_tags` requires every pair of `preferred_tags` instead of one. `case_sensitive` does
    not accept `<Answer>` as `<answer>`. `strict` also requires exactly one think block, at the start
    of the completion, with text after the block.
    """
    text = completion if case_sensitive else completion.lower()
    tags = preferred_tags if case_sensitive else [tag.lower() for tag in preferred_tags]
    found = [_has_pair(text, tag) for tag in tags]
    shaped = all(found) if require_all_tags else any(found)
    return float(shaped and (not strict or _thinks_once_first(text)))


def _has_pair(text: str, tag: str) -> bool:
    for piece in text.split(f"</{tag}>")[:-1]:
        _, opened, inside = piece.rpartition(f"<{tag}>")
        if opened and inside.strip():
            return True
    return False


def _thinks_once_first(text: str) -> bool:
    if text.count("<think>") != 1 or text.count("</think>") != 1:
        return False
    return re.fullmatch(r"\s*<think>.*</think>\s*\S.*", text, re.DOTALL) is not None
