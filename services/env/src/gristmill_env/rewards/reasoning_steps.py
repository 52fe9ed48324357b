"""A reward for marked reasoning steps."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from gristmill_env.rewards.registry import reward

_LIST = re.compile(r"[ \t>]*(?:[0-9]{1,3}[.)]|[-*•])[ \t]+(?=[^\s*-])")
_STEP = re.compile(
    r"[ \t>#*_]*(?:(?:[Ss]tep|STEP)[ \t]*[0-9]+\b"
    r"|(?:First(?:ly)?|Second(?:ly)?|Third(?:ly)?|Next|Then|After that|Afterwards|Finally|Lastly)(?=[,:*\s]))"
)
_STEP_DOT = re.compile(r"((?:[Ss]tep|STEP)[ \t]*[0-9]+)\.")
_SENTENCE_END = re.compile(r"(?<=[.!?])[ \t]+")


@reward("reasoning_steps")
def reasoning_steps(completion: str, *, min_steps: Annotated[int, Field(gt=0)] = 3) -> float:
    """min(1, markers / min_steps): how many steps the text marks, and 1 from `min_steps` on.

    A marker is a line that begins with a number ("1. ", "2) ") or a bullet ("- ", "* ", "• "), or a
    sentence that begins with "Step 1" or with First, Firstly, Second, Secondly, Third, Thirdly, Next,
    Then, After that, Afterwards, Finally or Lastly. Markdown before it ("**Step 1:**", "## Step 1")
    is allowed. One step is counted once, however it is marked: "1. First, ..." is one marker.
    """
    return min(1.0, sum(_markers(line) for line in completion.splitlines()) / min_steps)


def _markers(line: str) -> int:
    listed = _LIST.match(line)
    # "Step 1. First, add" is one step: the full stop after "1" does not end a sentence.
    text = _STEP_DOT.sub(r"\1:", line[listed.end() :] if listed else line)
    begun = [_STEP.match(sentence) is not None for sentence in _SENTENCE_END.split(text)]
    return 1 + sum(begun[1:]) if listed else sum(begun)
