"""A reward for each tag that appears exactly once."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gristmill_env.rewards.registry import reward


@reward("tag_count")
def tag_count(
    completion: str, *, preferred_tags: Annotated[tuple[str, ...], Field(min_length=1)] = ("think", "answer")
) -> float:
    """Share of the opening and closing tags of `preferred_tags` that appear exactly once, 0 to 1.

    Partial credit towards the reward `format`. A repeated tag counts as little as a missing tag, so
    repetition earns nothing. The order of the tags does not count. The idea comes from open-r1
    (Hugging Face, 2025), which counts four tags at a quarter each.
    """
    tags = [text for tag in preferred_tags for text in (f"<{tag}>", f"</{tag}>")]
    return sum(completion.count(tag) == 1 for tag in tags) / len(tags)
