"""`sft` and `dpo`: the best completions of saved groups, and pairs of them, in the formats of TRL."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from gristmill.internal.saved import Message, SavedCompletion, SavedGroup, content_of
from gristmill_env.commands import DpoOptions, SftOptions
from gristmill_env.commands.source import count_lines, open_groups, require_turns
from gristmill_env.console import Steps, say
from gristmill_env.errors import SavedError
from gristmill_env.run_settings import RunSettings
from gristmill_env.saved.summary import SAME
from gristmill_env.saved.writer import new_file


class LeftOut(StrEnum):
    """Reasons for omitting a completion or a group from an export."""

    NO_SCORE = "without a score"
    TWICE = "the same as another of their group"
    CUT = "cut short"
    LOW = "of too low a score"
    NOT_BEST = "not among the best of their group"
    OWN_PROMPT = "with their own prompt"
    NO_PAIR = "groups without two that differ enough"


class Conversation(msgspec.Struct, frozen=True, omit_defaults=True):
    """TRL's conversational language-modelling row."""

    messages: list[Message]
    tools: str | None = None
    """JSON, which TRL decodes. As objects, the tools of all rows would get one Arrow type with the keys of each."""


class PromptAndCompletion(msgspec.Struct, frozen=True):
    """TRL's plain prompt-completion row. The prompt is already rendered by the chat template."""

    prompt: str
    completion: str


class ConversationPair(msgspec.Struct, frozen=True, omit_defaults=True):
    """TRL's conversational preference row, with the two scores."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    score_chosen: float
    score_rejected: float
    tools: str | None = None
    """As in `Conversation`."""


class TextPair(msgspec.Struct, frozen=True):
    """TRL's plain preference row, with the two scores. The prompt is already rendered by the chat template."""

    prompt: str
    chosen: str
    rejected: str
    score_chosen: float
    score_rejected: float


Pick = Callable[[SavedGroup, Counter[LeftOut]], Iterator[msgspec.Struct]]


def sft(run: RunSettings, options: SftOptions, console: Console) -> Coroutine[Any, Any, None]:
    """Writes the best `top_n` completions of each group to `out`. Raises GristmillError."""
    return export(run, options.saved, options.out, lambda group, left_out: best(group, options, left_out), console)


def best(
    group: SavedGroup, options: SftOptions, left_out: Counter[LeftOut]
) -> Iterator[Conversation | PromptAndCompletion]:
    """Yields the group's rows. Omits truncated completions, because they would teach the model to stop early."""
    taken = 0
    for total, completion in distinct(group, left_out):
        if completion.truncated:
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
                yield Conversation([*split[0], *split[1]], tools_of(group, completion))


def dpo(run: RunSettings, options: DpoOptions, console: Console) -> Coroutine[Any, Any, None]:
    """Writes up to `pairs` pairs per group to `out`. Raises GristmillError."""
    return export(run, options.saved, options.out, lambda group, left_out: pairs(group, options, left_out), console)


def pairs(group: SavedGroup, options: DpoOptions, left_out: Counter[LeftOut]) -> Iterator[ConversationPair | TextPair]:
    """Yields the group's rows, largest difference first.

    A truncated completion may be the worse of a pair, never the better; ties do not form pairs. Nor do completions
    whose first turn is not the model's, or whose prompt has other tools, because a pair has one prompt.
    """
    found_scored = distinct(group, left_out)
    scored = [
        (total, one) for total, one in found_scored if one.tools is None and one.turns[0].get("role") == "assistant"
    ]
    left_out[LeftOut.OWN_PROMPT] += len(found_scored) - len(scored)
    candidates = [
        (better - worse, chosen, rejected, better, worse)
        for at, (better, chosen) in enumerate(scored)
        for worse, rejected in scored[at + 1 :]
        if not chosen.truncated and better - worse > SAME and better - worse >= options.min_difference
    ]
    if not candidates:
        left_out[LeftOut.NO_PAIR] += 1
    for _, chosen, rejected, better, worse in sorted(candidates, key=lambda pair: -pair[0])[: options.pairs]:
        split, other = turns(group, chosen), turns(group, rejected)
        if split is None or other is None:
            prompt = group.prompt_text or group.prompt
            yield TextPair(prompt, chosen.text, rejected.text, better, worse)
        else:
            yield ConversationPair(split[0], split[1], other[1], better, worse, tools_of(group, chosen))


async def export(run: RunSettings, saved: Path, out: Path, pick: Pick, console: Console) -> None:
    """Writes the rows that `pick` yields for each group as JSONL, and prints the counts of omitted rows.

    Raises SavedError when there is nothing to write, or when some groups hold messages and others plain text,
    because trainers read one kind per file.
    """
    left_out: Counter[LeftOut] = Counter()
    written, kind = 0, None
    with new_file(out, saved) as temporary, Steps("groups", count_lines(saved)) as steps:
        with temporary.open("wb") as file:
            for group in open_groups(run, saved):
                require_turns(group, saved)
                for row in pick(group, left_out):
                    if kind not in (None, type(row)):
                        raise SavedError(
                            "groups_mixed",
                            f"{saved} holds groups with messages and groups of plain text; export them apart",
                            path=saved,
                        )
                    kind = type(row)
                    file.write(msgspec.json.encode(row) + b"\n")
                    written += 1
                steps.add()
                await asyncio.sleep(0)  # lets a stop signal in
        if written == 0:
            raise SavedError(
                "nothing_to_export",
                f"nothing of {saved} is to be exported; {told(left_out) or 'it holds no groups'}",
                path=saved,
                left_out={reason.name.lower(): count for reason, count in left_out.items() if count},
            )
    say(console, f"{written} rows: {out}")
    if left_out.total():
        say(console, told(left_out))


def distinct(group: SavedGroup, left_out: Counter[LeftOut]) -> list[tuple[float, SavedCompletion]]:
    """Returns the group's scored completions, best first, each text once. Counts the others in `left_out`."""
    scored = [(c.total, c) for c in group.completions if c.total is not None]
    left_out[LeftOut.NO_SCORE] += len(group.completions) - len(scored)
    seen: list[list[Message] | str] = []
    unique = []
    for total, completion in sorted(scored, key=lambda pair: -pair[0]):
        said = completion.messages if completion.messages is not None else completion.text
        if said in seen:
            left_out[LeftOut.TWICE] += 1
        else:
            seen.append(said)
            unique.append((total, completion))
    return unique


def turns(group: SavedGroup, completion: SavedCompletion) -> tuple[list[Message], list[Message]] | None:
    """Returns the conversation before the answer, and the answer; None if only text is known.

    A prefill, which begins the model's answer, belongs to the answer.
    """
    if group.messages is None:
        return None
    prompt = list(group.messages)
    answer = completion.turns
    if prompt and prompt[-1].get("role") == "assistant" and answer[0].get("role") == "assistant":
        begun = prompt.pop()
        answer[0] = {**answer[0], "content": content_of(begun) + content_of(answer[0])}
    return prompt, answer


def tools_of(group: SavedGroup, completion: SavedCompletion) -> str | None:
    """Returns the tools of the completion's prompt as JSON; None without tools."""
    tools = group.tools if completion.tools is None else completion.tools
    return msgspec.json.encode(tools).decode() if tools else None


def told(left_out: Counter[LeftOut]) -> str:
    """ "left out: 3 without a score, 1 cut short"; "" when nothing was left out."""
    words = [f"{count} {reason}" for reason, count in left_out.items() if count]
    return f"left out: {', '.join(words)}" if words else ""
