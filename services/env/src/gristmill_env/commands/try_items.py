"""`try`: shows five items of a run, from prompt to score, before training. Needs only a model server."""

from __future__ import annotations

import asyncio

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from gristmill.internal.saved import content_of
from gristmill_env.console import plain, say
from gristmill_env.data import Message
from gristmill_env.errors import ROW_ERRORS
from gristmill_env.rollouts.groups import Rollout, RolloutGroup
from gristmill_env.run_settings import RunSettings
from gristmill_env.saved.summary import figure
from gristmill_env.session import AT_A_TERMINAL, Source, load_tasks, open_session

_ITEMS = 5
_ITEMS_OF_A_SOURCE = 2
"""Items of each source, if the run has several."""


async def try_items(run: RunSettings, console: Console) -> None:
    """Shows the first items of each source, in the run's order. Raises GristmillError."""
    patience = run.config.startup_patience or AT_A_TERMINAL
    async with open_session(run, load_tasks(run), patience=patience) as session:
        most = _ITEMS if len(session.sources) == 1 else _ITEMS_OF_A_SOURCE
        items = await asyncio.gather(*(_first(source, most) for source in session.sources))
    for source, rollouts in zip(session.sources, items, strict=True):
        dataset, name = source.task.dataset, source.task.name
        of = "" if name is None else f"source {name}: "
        model = f"model {session.served.name} at {session.server.description}"
        say(console, f"{of}{dataset.label}, {len(dataset)} rows; {model}")
        for number, group in enumerate(rollouts, 1):
            if isinstance(group, str):
                console.print(Panel(plain(group), title=f"item {number}: skipped", title_align="left"))
            else:
                _show(console, number, group)


async def _first(source: Source, most: int) -> list[RolloutGroup | str]:
    rows = range(min(most, len(source.task.dataset)))
    return await asyncio.gather(*(_generate(source, row) for row in rows))


async def _generate(source: Source, row: int) -> RolloutGroup | str:
    try:
        return await source.generator.generate_and_score(source.task.dataset.item(row), f"item {row + 1}")
    except ROW_ERRORS as error:
        return error.report()


def _show(console: Console, number: int, group: RolloutGroup) -> None:
    tokens = f", {len(group.prompt.token_ids)} prompt tokens" if group.prompt.token_ids else ""
    title = f"item {number}: row {group.item.index}{tokens}"
    console.print(Panel(plain(group.prompt.text), title=title, title_align="left"))
    if group.item.answer is not None:
        console.print(plain(f"answer: {group.item.answer}"))
    table = Table("completion", "tokens", "end", *group.scores[0].parts, "total", show_lines=True)
    for rollout, score in zip(group.rollouts, group.scores, strict=True):
        parts = [figure(value) for value in score.parts.values()]
        total = Text(score.error, "red") if score.error is not None else Text(figure(score.total), "bold")
        tokens = "unknown" if rollout.sampled is None else str(rollout.sampled)
        table.add_row(plain(_turns(rollout)), tokens, rollout.finish_reason, *parts, total)
    console.print(table)


def _turns(rollout: Rollout) -> str:
    """Returns the reply of a rollout; if it has several, each message after the prompt with its role."""
    if rollout.replies == 1:
        return rollout.text
    branches = [branch.messages[len(branch.prompt.messages) :] for branch in rollout.branches]
    return "\n\n".join("\n".join(map(_turn, turns)) for turns in branches)


def _turn(message: Message) -> str:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [f"{function['name']}({function['arguments']})" for function in functions]
    return f"{message['role']}: {' '.join(filter(None, [content_of(dict(message)), *calls]))}"
