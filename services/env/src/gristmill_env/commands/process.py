"""`process`: writes groups of a run to disk, for inspection and later commands. Needs a model server but no API."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from gristmill_env.commands import ProcessOptions
from gristmill_env.console import Steps, say, show_summary
from gristmill_env.errors import ROW_ERRORS, SavedError, reason_of
from gristmill_env.evaluation.run import weight_label
from gristmill_env.gather import gather
from gristmill_env.run_settings import RunSettings
from gristmill_env.saved import GroupSaver, read_groups
from gristmill_env.saved.group import settings_of
from gristmill_env.saved.page import write_page
from gristmill_env.session import Session, load_tasks, open_session
from gristmill_env.settings.run import differences

logger = logging.getLogger(__name__)


async def process(run: RunSettings, options: ProcessOptions, console: Console) -> None:
    """Writes the groups of rows 0 to `groups` − 1 and a page of them. Does not repeat rows that the file already has.

    If stopped early, keeps the groups so far and their page. Raises GristmillError.
    """
    path = options.out or run.run_folder
    path = path if path.suffix == ".jsonl" else path / "groups.jsonl"
    config = run.config
    async with open_session(run, load_tasks(run)) as session:
        model = session.served.name
        done = _rows_there(path, settings_of(config, model), await weight_label(session.server))
        rows = [row for row in range(options.groups) if row not in done]
        if done:
            say(console, f"{len(done)} groups are in {path} already")
        skipped: Counter[str] = Counter()
        with GroupSaver(path, run=run.run_id, model=model, config=config) as saver:
            try:
                with Steps("groups", len(rows)) as steps:
                    waiting = iter(rows)
                    workers = min(config.workers, len(rows))
                    await gather(_work(waiting, session, saver, steps, skipped) for _ in range(workers))
            finally:
                page = path.with_suffix(".html")
                summary = write_page(lambda: read_groups(path), page, f"Groups of {run.run_id}")
                show_summary(console, summary)
                if skipped:
                    reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.most_common())
                    say(console, f"{skipped.total()} rows skipped: {reasons}")
                say(console, f"groups: {path}\npage:   {page}")


async def _work(rows: Iterator[int], session: Session, saver: GroupSaver, steps: Steps, skipped: Counter[str]) -> None:
    """Rolls rows and saves each group when it is done. `skipped`: receives the rows that cannot be used, by reason."""
    for row in rows:  # shared: each row goes to one worker
        try:
            source, place = session.at(row)
            scored = await source.generator.generate_and_score(source.task.dataset.item(place, row), f"row {row}")
        except ROW_ERRORS as error:
            logger.warning("row %d is skipped: %s", row, error.report())
            skipped[reason_of(error).value] += 1
            steps.add()
            continue
        group = await saver.save(scored)
        steps.add(tokens=sum(completion.tokens or 0 for completion in group.completions))


def _rows_there(path: Path, settings: Mapping[str | None, dict[str, Any]], weights: str | None) -> set[int]:
    """Returns the rows that the file holds. `settings`: by source. `weights`: the server's label, if it has one.

    Raises SavedError when the rows were made with other settings or weights, or by a training.
    """
    if not path.exists():
        return set()
    rows: set[int] = set()
    for group in read_groups(path):
        if group.row is None or group.settings is None or group.creation is not None:
            raise SavedError(
                "groups_of_another_kind", f"{path} holds groups of another kind; choose another --out", path=path
            )
        sampled_by = [weights] if group.versions and weights is not None else group.versions
        now = {**settings.get(group.source, {}), "weights": sampled_by}
        if differ := differences({**group.settings, "weights": group.versions}, now):
            raise SavedError(
                "config_differs",
                f"{path} holds groups made with other settings ({'; '.join(differ)}); choose another --out, or "
                "remove the file",
                path=path,
                changed=differ,
            )
        rows.add(group.row)
    return rows
