"""`dpo`: pairs of a better and a worse completion of saved groups, for preference training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Coroutine, Iterator
from typing import Any

import msgspec
from rich.console import Console

from gristmill_env.commands.candidates import LeftOut, distinct, turns
from gristmill_env.commands.export import export
from gristmill_env.commands.options import DpoOptions
from gristmill_env.launch import Launch
from gristmill_env.saved import Message, SavedGroup
from gristmill_env.saved.summary import SAME


class ConversationPair(msgspec.Struct, frozen=True):
    """TRL's conversational preference row, with the two scores."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    score_chosen: float
    score_rejected: float


class TextPair(msgspec.Struct, frozen=True):
    """TRL's plain preference row, with the two scores. The prompt is already rendered by the chat template."""

    prompt: str
    chosen: str
    rejected: str
    score_chosen: float
    score_rejected: float


def dpo(launch: Launch, options: DpoOptions, console: Console) -> Coroutine[Any, Any, None]:
    """Writes up to `pairs` pairs per group to `out`. Raises GristmillError."""

    def pick(group: SavedGroup, left_out: Counter[LeftOut]) -> Iterator[ConversationPair | TextPair]:
        return pairs(group, options, left_out)

    return export(launch, options.saved, options.out, pick, console)


def pairs(group: SavedGroup, options: DpoOptions, left_out: Counter[LeftOut]) -> Iterator[ConversationPair | TextPair]:
    """Yields the group's rows, largest difference first.

    A truncated completion may be the worse of a pair, never the better; ties do not form pairs.
    """
    scored = distinct(group, left_out)
    found = [
        (better - worse, chosen, rejected, better, worse)
        for at, (better, chosen) in enumerate(scored)
        for worse, rejected in scored[at + 1 :]
        if not chosen.cut and better - worse > SAME and better - worse >= options.min_difference
    ]
    if not found:
        left_out[LeftOut.NO_PAIR] += 1
    for _, chosen, rejected, better, worse in sorted(found, key=lambda pair: -pair[0])[: options.pairs]:
        split, other = turns(group, chosen), turns(group, rejected)
        if split is None or other is None:
            prompt = group.prompt_text or group.prompt
            yield TextPair(prompt, chosen.text, rejected.text, better, worse)
        else:
            yield ConversationPair(split[0], split[1], other[1], better, worse)
