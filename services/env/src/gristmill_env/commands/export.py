"""Writes an export: the rows that a command picks from each group, as JSONL."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
from rich.console import Console

from gristmill_env.commands.candidates import LeftOut, told
from gristmill_env.commands.progress import Steps
from gristmill_env.commands.source import count_lines, open_groups
from gristmill_env.errors import SavedError
from gristmill_env.launch import Launch
from gristmill_env.saved import SavedGroup
from gristmill_env.saved.writer import new_file

Row = TypeVar("Row", bound=msgspec.Struct)
Pick = Callable[[SavedGroup, Counter[LeftOut]], Iterator[Row]]


async def export(launch: Launch, saved: Path, out: Path, pick: Pick[Row], console: Console) -> None:
    """Writes the rows that `pick` yields for each group, and prints the counts of omitted rows.

    Raises SavedError when there is nothing to write, or when some groups hold messages and others plain text,
    because trainers read one kind per file.
    """
    left_out: Counter[LeftOut] = Counter()
    written, kind = 0, None
    with new_file(out, saved) as temporary, Steps("groups", count_lines(saved)) as steps:
        with temporary.open("wb") as file:
            for group in open_groups(launch, saved):
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
    console.print(f"{written} rows: {out}", highlight=False, soft_wrap=True)
    if left_out.total():
        console.print(told(left_out), highlight=False, soft_wrap=True)
