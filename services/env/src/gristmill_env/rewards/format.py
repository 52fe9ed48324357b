"""Does the completion have the shape that was asked for?"""

from __future__ import annotations

import re

from gristmill_env.rewards.registry import reward


@reward("format")
def format_tags(
    completion: str,
    *,
    preferred_tags: tuple[str, ...] = ("think", "answer"),
    require_all_tags: bool = False,
    strict: bool = False,
) -> float:
    """1 when a pair of the preferred tags with something in it is there (`<answer>25</answer>`), else 0.

    Options: `preferred_tags`; `require_all_tags` wants every pair instead of any; `strict` also
    wants exactly one think block, at the very start, and something after it.
    """
    found = [_has_pair(completion, tag) for tag in preferred_tags]
    shaped = all(found) if require_all_tags else any(found)
    return float(shaped and (not strict or _thinks_once_first(completion)))


def _has_pair(text: str, tag: str) -> bool:
    start = text.find(f"<{tag}>")
    end = text.rfind(f"</{tag}>")
    return start >= 0 and bool(text[start + len(tag) + 2 : end].strip()) if end > start else False


def _thinks_once_first(text: str) -> bool:
    if text.count("<think>") != 1 or text.count("</think>") != 1:
        return False
    return re.fullmatch(r"\s*<think>.*</think>\s*\S.*", text, re.DOTALL) is not None
