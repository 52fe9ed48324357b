"""The page's data from the files of runs, with live counts if there is an API."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import logging
import math
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol, cast

import msgspec

from gristmill.deployment import RUN_ID
from gristmill.run import RunState
from gristmill_view.facts import Facts
from gristmill_view.overview import overview, to_json
from gristmill_view.series import flat, series
from gristmill_view.source import (
    Download,
    Highlight,
    News,
    Overview,
    PromptHistory,
    RolloutPage,
    RolloutQuery,
    RunLine,
    Series,
    Timeline,
    ViewError,
    in_thread,
)
from gristmill_view.tables import load_table_reader
from gristmill_view.trouble import LOST

_LOG = logging.getLogger(__name__)
_CHUNK: Final = 1 << 20
_RUN: Final = re.compile(RUN_ID)
_NICE: Final = 5
_SPARK: Final = 60
ANSWER_S: Final = 300.0
"""Longest time of an answer. The first table of rollouts of a long run takes minutes."""


class Live(Protocol):
    """The live state of an API's runs."""

    async def runs(self) -> list[str]:
        """Returns the ids of the runs that the API has, newest first."""

    async def facts(self, run: str) -> Facts | None:
        """Returns the facts of a run; None if the API does not have it."""


class RunSource:
    """Reads runs. A separate process reads the files, so that reading does not delay a server's requests.

    That process starts with the first question, and ends with `close`. If a question takes too long, another process
    replaces it. All questions raise ViewError.
    """

    def __init__(self, roots: Sequence[Path], live: Live | None = None, *, answer_s: float = ANSWER_S) -> None:
        """`roots`: folders of run folders; a file of a run counts from the first root that has it. The first root
        belongs to the reader. `answer_s`: longest time of an answer, which may be changed."""
        self.answer_s = answer_s
        self._roots = tuple(Path(root) for root in roots)
        self._live = live
        self._pool: ProcessPoolExecutor | None = None
        self._process: Future[int] | None = None
        """The id of the process that reads files."""

    def close(self) -> None:
        """Ends the process that reads files."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    async def _ask(self, question: str, *arguments: object) -> Any:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(max_workers=1, mp_context=context, initializer=_begin)
            self._process = self._pool.submit(os.getpid)
        pool, process = self._pool, self._process
        try:
            answer = asyncio.wrap_future(pool.submit(_answer, question, self._roots, *arguments))
            async with asyncio.timeout(self.answer_s):  # `wait_for` of Python 3.11 may swallow a cancellation
                return await answer
        except TimeoutError as error:
            if self._pool is pool:
                self.close()
            if process is not None and process.done():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.result(), signal.SIGKILL)
            text = f"The answer took longer than {self.answer_s:.0f} seconds, and the process that read was replaced."
            raise ViewError(
                "answer_late", text, status=503, remedy="Try again. `gristmill sql` reads a run without a time limit."
            ) from error
        except BrokenProcessPool as error:  # killed, for memory perhaps: the next question starts another
            if self._pool is pool:
                self.close()
            raise ViewError("reader_ended", "The process that reads the runs' files ended.", status=503,
                            remedy="Try again. If it ends again, give the service more memory.") from error  # fmt: skip

    async def _facts(self, run: str) -> Facts | None:
        if not _RUN.fullmatch(run):
            raise ViewError("run_missing", f"{run[:80]!r} is not a run id.", remedy="Choose a run from the list.")
        return None if self._live is None else await self._live.facts(run)

    async def runs(self) -> list[RunLine]:
        """Returns the runs of the API, then those that have files only."""
        lines: list[dict[str, Any]] = []
        for run in [] if self._live is None else await self._live.runs():
            lines += await self._line(run)
        known = {line["run"] for line in lines}
        lines += [line for line in await self._ask("run_lines") if line["run"] not in known]
        return cast(list[RunLine], lines)

    async def _line(self, run: str) -> list[dict[str, Any]]:
        """Returns the line of a run of the API. A run whose rows cannot be read does not hide the others."""
        try:
            facts = await self._facts(run)
            return [] if facts is None else [line_of(facts)]
        except ViewError:
            raise
        except Exception:  # noqa: BLE001  whatever an environment sent
            _LOG.exception("run %s cannot be read", run)
            return [line_of(Facts(run=run, state="unreadable"))]

    async def overview(self, run: str) -> Overview:
        """Returns the state of a run: from the API, else from its files."""
        facts = await self._facts(run)
        if facts is not None:
            return to_json(overview(facts))
        return self._of_files(await self._ask("overview_of", run))

    def _of_files(self, found: Overview) -> Overview:
        """Returns the overview of a run's files. An API that shows the files of an open run has lost the run."""
        if self._live is not None and found["state"] != RunState.FINISHED:
            found["trouble"] = msgspec.to_builtins(LOST)
            found["troubles"] = [found["trouble"], *found["troubles"]]
        return found

    async def series(self, run: str, names: Sequence[str], points: int) -> Series:
        """Returns metrics in at most `points` buckets, from the trainer's file if it is there, else from the API.

        `names`: a name that ends with `.*` selects a group of metrics, such as `reward_parts.*`. A name that the run
        does not have is left out.
        """
        facts = await self._facts(run)
        try:
            found = await self._ask("series_of", run, list(names), points)
        except ViewError:
            if facts is None:
                raise
            found = {"step": []}
        if not found["step"] and facts is not None:
            found = await in_thread(series, facts.rows, names, points)
        return cast(Series, found)

    async def news(self, run: str, after_step: int) -> News:
        """Returns what changed in a run since a step. Cheap: it is called once per second while a page is open."""
        facts = await self._facts(run)
        if facts is None:
            found = await self._ask("news_of", run, after_step)
            return cast(News, {**found, "overview": self._of_files(found["overview"])})
        last = int(facts.rows[-1]["step"]) if facts.rows else 0
        rows = flat_rows(facts.rows, after_step)
        return {"steps": rows, "last_step": last, "overview": to_json(overview(facts))}

    async def step(self, run: str, step: int) -> dict[str, Any]:
        """Returns the metrics and the groups of a step. `recorded` is False if the run does not know the step of any
        trained group, so that the list of groups is empty."""
        facts = await self._facts(run)
        try:
            return cast(dict[str, Any], await self._ask("step_of", run, step))
        except ViewError:
            row = next((row for row in facts.rows if row["step"] == step), None) if facts is not None else None
            if row is None:
                raise
            return {"step": step, "metrics": dict(flat(row)), "groups": []}

    async def timeline(self, run: str, step: int) -> Timeline:
        """Returns the work and the waits of a step."""
        return cast(Timeline, await self._ask("timeline_of", run, step))

    async def group(self, run: str, group_id: str) -> dict[str, Any]:
        """Returns a group and its tokens."""
        return cast(dict[str, Any], await self._ask("group_of", run, group_id))

    async def prompt(self, run: str, group_id: str, of: str) -> PromptHistory:
        """Returns the groups of a run that have the prompt of a group of the run `of`, which may be the same run."""
        return cast(PromptHistory, await self._ask("prompt_of", run, group_id, of))

    async def rollouts(self, run: str, query: RolloutQuery) -> RolloutPage:
        """Returns a page of rollouts; an empty one for a run of the API that has no file yet."""
        facts = await self._facts(run)
        try:
            return cast(RolloutPage, await self._ask("rollouts_of", run, query))
        except ViewError as error:
            if facts is None or error.code != "run_missing":
                raise
            return {"total": 0, "rows": [], "histogram": []}

    async def highlights(self, run: str, steps: Sequence[int]) -> list[Highlight]:
        """Returns the best and the worst completion of some steps, without the table of rollouts. Steps without a known
        completion are left out."""
        return cast(list[Highlight], await self._ask("highlights_of", run, list(steps)))

    async def download(self, run: str, query: RolloutQuery, kind: Download) -> AsyncIterator[bytes]:
        """Yields a file of the selected rollouts. `limit` and `offset` of the query do not count."""
        path = Path(await self._ask("download", run, query, kind))
        file = await in_thread(_opened, path)
        with file:
            while part := await in_thread(file.read, _CHUNK):
                yield part

    async def compare(self, runs: Sequence[str]) -> dict[str, Any]:
        """Returns the settings that differ between runs, and after which step of another run a fork begins."""
        found = {run: (await self.overview(run))["settings"] for run in runs}
        keys = dict.fromkeys(key for settings in found.values() for key in settings)
        differ = [
            {"key": key, "values": {run: settings.get(key) for run, settings in found.items()}}
            for key in keys
            if len({repr(settings.get(key)) for settings in found.values()}) > 1
        ]
        after = await self._ask("fork_steps", list(runs))
        return {
            "settings_diff": differ,
            "after": after,
            "runs": [line for line in await self.runs() if line["run"] in runs],
        }


def _opened(path: Path) -> BinaryIO:
    """Opens a temporary file and removes its name, so that it is gone when it is closed, whatever happens."""
    file = path.open("rb")
    path.unlink()
    return file


def _begin() -> None:
    """Prepares the reading process, which ends with its server even if that is killed."""
    os.nice(_NICE)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _answer(question: str, roots: tuple[Path, ...], *arguments: object) -> Any:
    """Answers in the reading process. Only that process loads pyarrow and DuckDB, which are large."""
    from gristmill_view import queries

    try:
        return getattr(queries, question)(roots, *arguments)
    finally:
        # While a person looks at the first answer, which needs neither.
        threading.Thread(target=_load, daemon=True).start()


def _load() -> None:
    with contextlib.suppress(ViewError):  # the question that needs the packages reports that they are missing
        load_table_reader()


def line_of(facts: Facts) -> dict[str, Any]:
    """Returns a run's line in the list of runs."""
    rewards = [row.get("reward_mean") for row in facts.rows]
    every = max(1, math.ceil(len(rewards) / _SPARK))
    newest = facts.rows[-1] if facts.rows else {}
    return {
        "run": facts.run,
        "state": facts.state,
        "step": newest.get("step", 0),
        "steps": facts.steps,
        "reward": newest.get("reward_mean"),
        "started_ms": None if facts.started is None else round(facts.started * 1000),
        "live": facts.status is not None,
        "config_name": None,
        "rewards": rewards[::every],
    }


def flat_rows(rows: Sequence[Mapping[str, Any]], after_step: int, most: int = 512) -> list[dict[str, Any]]:
    """Returns the newest rows after a step, with flat names. `rows`: in order of steps."""
    first = bisect.bisect_right(rows, after_step, key=lambda row: row["step"])
    return [dict(flat(row)) for row in rows[first:][-most:]]
