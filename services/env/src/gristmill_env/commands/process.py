"""`process`: writes groups of a run to disk, for inspection and later commands. Needs a model server but no API."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from gristmill_env.commands.options import ProcessOptions
from gristmill_env.commands.progress import Steps
from gristmill_env.commands.show import show_summary
from gristmill_env.drops import ROW_ERRORS, reason_of
from gristmill_env.errors import SavedError
from gristmill_env.inference import ModelServers, Thinking
from gristmill_env.launch import Launch
from gristmill_env.prepare import AT_A_TERMINAL, Task, meet_model
from gristmill_env.roller import Roller
from gristmill_env.saved import GroupSaver, GroupWriter, read_groups
from gristmill_env.saved.group import settings_of
from gristmill_env.saved.page import write_page
from gristmill_env.settings import differences
from gristmill_env.together import together

logger = logging.getLogger(__name__)


async def process(launch: Launch, options: ProcessOptions, console: Console) -> None:
    """Writes the groups of rows 0 to `groups` − 1 and a page of them. Does not repeat rows that the file already has.

    If stopped early, keeps the groups so far and their page. Raises GristmillError.
    """
    path = options.out or launch.run_folder
    path = path if path.suffix == ".jsonl" else path / "groups.jsonl"
    task = Task.load(launch)
    config = launch.config
    servers = ModelServers(config.server_configs, patience=config.patience, thinking=Thinking.of(config))
    async with task, servers as server:
        patience = config.startup_patience or AT_A_TERMINAL
        served, roller = await meet_model(launch, task, server, patience)
        done = _rows_there(path, settings_of(config, served.name))
        rows = [row for row in range(options.groups) if row not in done]
        if done:
            console.print(f"{len(done)} groups are in {path} already", highlight=False, soft_wrap=True)
        skipped: Counter[str] = Counter()
        with GroupWriter(path) as writer:
            try:
                with Steps("groups", len(rows)) as steps:
                    saver = GroupSaver(writer, run=launch.run_id, model=served.name, config=config)
                    await _Rows(config.workers, task, roller, saver, steps, skipped).run(rows)
            finally:
                page = path.with_suffix(".html")
                summary = write_page(lambda: read_groups(path), page, f"Groups of {launch.run_id}")
                show_summary(console, summary)
                if skipped:
                    reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.most_common())
                    console.print(f"{skipped.total()} rows skipped: {reasons}", highlight=False, soft_wrap=True)
                console.print(f"groups: {path}\npage:   {page}", highlight=False, soft_wrap=True)


def _rows_there(path: Path, settings: dict[str, Any]) -> set[int]:
    """Returns the rows that the file holds. Raises SavedError when they were made with other settings."""
    if not path.exists():
        return set()
    rows: set[int] = set()
    for group in read_groups(path):
        if group.row is None or group.settings is None:
            raise SavedError(
                "groups_of_another_kind", f"{path} holds groups of another kind; choose another --out", path=path
            )
        if differ := differences(group.settings, settings):
            raise SavedError(
                "config_differs",
                f"{path} holds groups made with other settings ({'; '.join(differ)}); choose another --out, or "
                "remove the file",
                path=path,
                changed=differ,
            )
        rows.add(group.row)
    return rows


class _Rows:
    """Rolls rows, several at a time, and saves each group when it is done."""

    def __init__(
        self, workers: int, task: Task, roller: Roller, saver: GroupSaver, steps: Steps, skipped: Counter[str]
    ) -> None:
        """`skipped`: receives the rows that cannot be used, by reason."""
        self._workers, self._task, self._roller, self._saver, self._steps = workers, task, roller, saver, steps
        self._skipped = skipped

    async def run(self, rows: list[int]) -> None:
        """Rolls the rows. Raises the first GristmillError that is not in ROW_ERRORS."""
        waiting = iter(rows)
        await together(self._work(waiting) for _ in range(min(self._workers, len(rows))))

    async def _work(self, rows: Iterator[int]) -> None:
        for row in rows:
            try:
                rollout = await self._roller.roll(self._task.dataset.item(row), f"row {row}")
            except ROW_ERRORS as error:
                logger.warning("row %d is skipped: %s", row, error.report())
                self._skipped[reason_of(error).value] += 1
                self._steps.add()
                continue
            group = await self._saver.save(rollout)
            self._steps.add(tokens=sum(completion.tokens or 0 for completion in group.completions))
