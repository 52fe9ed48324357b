"""`try`: shows five items of a run, from prompt to score, before training. Needs only a model server."""

from __future__ import annotations

import asyncio

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from gristmill_env.console import plain, say
from gristmill_env.errors import ROW_ERRORS
from gristmill_env.launch import Launch
from gristmill_env.rollouts.transcript import Rollout
from gristmill_env.saved.summary import figure
from gristmill_env.session import AT_A_TERMINAL, Session, Task, open_session

_ITEMS = 5


async def try_items(launch: Launch, console: Console) -> None:
    """Shows the first five items of the run's order. Raises GristmillError."""
    patience = launch.config.startup_patience or AT_A_TERMINAL
    async with open_session(launch, Task.load(launch), patience=patience) as session:
        dataset, model = session.task.dataset, session.served.name
        rows = range(min(_ITEMS, len(dataset)))
        rollouts = await asyncio.gather(*(_roll(session, row) for row in rows))
    say(console, f"{dataset.label}, {len(dataset)} rows; model {model} at {session.server.description}")
    for number, rollout in enumerate(rollouts, 1):
        if isinstance(rollout, str):
            console.print(Panel(plain(rollout), title=f"item {number}: skipped", title_align="left"))
        else:
            _show(console, number, rollout, launch)


async def _roll(session: Session, row: int) -> Rollout | str:
    try:
        return await session.roller.roll(session.task.dataset.item(row), f"item {row + 1}")
    except ROW_ERRORS as error:
        return error.report()


def _show(console: Console, number: int, rollout: Rollout, launch: Launch) -> None:
    tokens = f", {len(rollout.prompt.token_ids)} prompt tokens" if rollout.prompt.token_ids else ""
    title = f"item {number}: row {rollout.item.index}{tokens}"
    console.print(Panel(plain(rollout.prompt.text), title=title, title_align="left"))
    if rollout.item.answer is not None:
        console.print(plain(f"answer: {rollout.item.answer}"))
    table = Table("completion", "tokens", "end", *rollout.scores[0].parts, "total", show_lines=True)
    for attempt, score in zip(rollout.attempts, rollout.scores, strict=True):
        parts = [figure(value) for value in score.parts.values()]
        total = Text(score.error, "red") if score.error is not None else Text(figure(score.total), "bold")
        tokens = "unknown" if attempt.sampled is None else str(attempt.sampled)
        table.add_row(plain(attempt.text), tokens, attempt.finish_reason, *parts, total)
    console.print(table)
