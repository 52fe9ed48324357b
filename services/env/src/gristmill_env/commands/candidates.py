"""Selects the completions of a group that an export may contain, and converts them to TRL's formats."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum

from gristmill_env.saved import Message, SavedCompletion, SavedGroup
from gristmill_env.saved.group import content_of


class LeftOut(StrEnum):
    """Reasons for omitting a completion or a group from an export."""

    NO_SCORE = "without a score"
    TWICE = "the same as another of their group"
    CUT = "cut short"
    LOW = "of too low a score"
    NOT_BEST = "not among the best of their group"
    NO_PAIR = "groups without two that differ enough"


def distinct(group: SavedGroup, left_out: Counter[LeftOut]) -> list[tuple[float, SavedCompletion]]:
    """Returns the group's scored completions, best first, each text once. Counts the others in `left_out`."""
    scored = [(c.total, c) for c in group.completions if c.total is not None]
    left_out[LeftOut.NO_SCORE] += len(group.completions) - len(scored)
    seen: list[list[Message] | str] = []
    kept = []
    for total, completion in sorted(scored, key=lambda pair: -pair[0]):
        said = completion.messages if completion.messages is not None else completion.text
        if said in seen:
            left_out[LeftOut.TWICE] += 1
        else:
            seen.append(said)
            kept.append((total, completion))
    return kept


def turns(group: SavedGroup, completion: SavedCompletion) -> tuple[list[Message], list[Message]] | None:
    """Returns the conversation before the answer, and the answer; None if only text is known.

    A prefill, which begins the model's answer, belongs to the answer.
    """
    if group.messages is None:
        return None
    prompt = list(group.messages)
    answer = list(completion.messages or [{"role": "assistant", "content": completion.text}])
    if prompt and prompt[-1].get("role") == "assistant" and answer[0].get("role") == "assistant":
        begun = prompt.pop()
        answer[0] = {**answer[0], "content": content_of(begun) + content_of(answer[0])}
    return prompt, answer


def told(left_out: Counter[LeftOut]) -> str:
    """ "left out: 3 without a score, 1 cut short"; "" when nothing was left out."""
    words = [f"{count} {reason}" for reason, count in left_out.items() if count]
    return f"left out: {', '.join(words)}" if words else ""
