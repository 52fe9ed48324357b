"""`sft`: the best completions of saved groups, for supervised fine-tuning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Coroutine, Iterator
from typing import Any

import msgspec
from rich.console import Console

from gristmill_env.commands.candidates import LeftOut, distinct, turns
from gristmill_env.commands.export import export
from gristmill_env.commands.options import SftOptions
from gristmill_env.launch import Launch
from gristmill_env.saved import Message, SavedGroup


class Conversation(msgspec.Struct, frozen=True):
    """TRL's conversational language-modelling row."""

    messages: list[Message]


class PromptAndCompletion(msgspec.Struct, frozen=True):
    """TRL's plain prompt-completion row. The prompt is already rendered by the chat template."""

    prompt: str
    completion: str


def sft(launch: Launch, options: SftOptions, console: Console) -> Coroutine[Any, Any, None]:
    """Writes the best `top_n` completions of each group to `out`. Raises GristmillError."""

    def pick(group: SavedGroup, left_out: Counter[LeftOut]) -> Iterator[Conversation | PromptAndCompletion]:
        return best(group, options, left_out)

    return export(launch, options.saved, options.out, pick, console)


def best(
    group: SavedGroup, options: SftOptions, left_out: Counter[LeftOut]
) -> Iterator[Conversation | PromptAndCompletion]:
    """Yields the group's rows. Omits truncated completions, because they would teach the model to stop early."""
    taken = 0
    for total, completion in distinct(group, left_out):
        if completion.cut:
            left_out[LeftOut.CUT] += 1
        elif total <= 0 if options.min_score is None else total < options.min_score:
            left_out[LeftOut.LOW] += 1
        elif taken == options.top_n:
            left_out[LeftOut.NOT_BEST] += 1
        else:
            taken += 1
            split = turns(group, completion)
            if split is None:
                yield PromptAndCompletion(group.prompt_text or group.prompt, completion.text)
            else:
                yield Conversation([*split[0], *split[1]])
