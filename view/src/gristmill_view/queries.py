"""The page's questions to the files of runs. `RunSource` asks them by their names in a separate process.

Each function takes the roots of the runs as its first argument and returns plain JSON values.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from gristmill.archive.run_file import RUN_FILE
from gristmill.folders import RunFolder, list_runs
from gristmill.internal.metrics import METRICS_FILE
from gristmill.run import RunState
from gristmill_view import groups
from gristmill_view.facts import Facts, read_files
from gristmill_view.groups import shown_id
from gristmill_view.overview import overview, to_json
from gristmill_view.run_source import flat_rows, line_of
from gristmill_view.samples import question, read_tokenizer
from gristmill_view.series import flat, series
from gristmill_view.source import LEFT_OUT, Download, RolloutQuery, Timeline, ViewError
from gristmill_view.tables import (
    Roots,
    as_view_errors,
    folder_of,
    literal,
    load_table_reader,
    needs_tables,
    rows_of,
    table_of,
)
from gristmill_view.timeline import MOST_GROUPS, Work, timeline, window

_LOG = logging.getLogger(__name__)
_BARS: Final = 20
_LINES: Final = 200
_FRESH_S: Final = 10.0
_MOST_FACTS: Final = 24
"""The page compares this many runs."""
_facts: OrderedDict[tuple[Roots, str], tuple[object, Facts]] = OrderedDict()
"""The facts of the runs that were asked for last, each with the state of its files."""
_lines: OrderedDict[tuple[Roots, str], tuple[object, dict[str, Any]]] = OrderedDict()
"""The lines of the list of runs, each with the state of the run's files: facts of all runs would need much memory."""
_READ: Final = 20_000
"""Characters of a prompt of which the last message of the user is shown."""
_SHOWN: Final = 2000
_MOST_GROUPS, _MOST_REWARDS, _EXCERPT = 200, 64, 300
"""Of one prompt: groups, rewards of a group, characters of a completion."""
_COLUMNS: Final = (
    "run, step, group_id, sequence, rollout, env_id, row, index, version_first, staleness, "
    f"right(prompt, {_READ}) AS prompt, left(completion, 2000) AS completion, completion_tokens, advantage, reward, "
    "reward_parts, finish_reason, outcome, outcome_reason, left(error, 2000) AS error, answer, extracted, seconds"
)
_ONE_ROW_EACH: Final = f"coalesce(branch, 0) = 0 AND outcome <> '{LEFT_OUT}'"
"""One row of each rollout of a group, whatever its number of branches. Groups without content have no branches."""
_NO_LISTS: Final = "* EXCLUDE (tokens, mask, sampler_logprobs, trainer_logprobs, advantages, entropy, replies)"


# --- Runs ------------------------------------------------------------------------------------------------------
def run_lines(roots: Roots) -> list[dict[str, Any]]:
    """Returns the lines of the list of runs, the latest first."""
    lines = (_line(roots, run.run_id) for run in list_runs(roots)[:_LINES])
    return [line for line in lines if line is not None]


def _line(roots: Roots, run: str) -> dict[str, Any] | None:
    """Returns a run's line; None if the folder's name is not a run id. A damaged run does not hide the others."""
    try:
        folder = folder_of(roots, run)
        written = _written(
            folder.own_file(METRICS_FILE), folder.file(RUN_FILE), folder.model(), *folder.logs().values()
        )
        known = _lines.pop((roots, run), None)
        # An open run whose files do not change any more becomes a stopped run.
        is_open = known is not None and known[1]["state"] == RunState.OPEN
        if known is None or known[0] != written or is_open:
            facts = facts_of(roots, run) if is_open else None
            if facts is None or facts.state != RunState.OPEN:  # The facts may be older than the files.
                facts = read_files(run, roots)
            known = written, line_of(facts)
        _lines[roots, run] = known
        if len(_lines) > _LINES:
            _lines.popitem(last=False)
        return known[1]
    except ViewError:
        return None
    except Exception as error:  # noqa: BLE001  whatever is in a run's files, the other runs stay visible
        _LOG.warning("the files of run %s cannot be read: %s", run, error)
        return line_of(Facts(run=run, state="unreadable"))


def facts_of(roots: Roots, run: str) -> Facts:
    """Returns what the files show of a run. Raises ViewError if no root has the run."""
    folder = folder_of(roots, run)
    written = _written(folder.own_file(METRICS_FILE), folder.own_file(RUN_FILE))
    # Ages of files change without a new row, so unchanged metrics are read again after a while.
    key = written, int(time.monotonic() / _FRESH_S)
    known = _facts.pop((roots, run), None)
    if known is None or known[0] != key:
        known = key, read_files(run, roots)
    _facts[roots, run] = known
    if len(_facts) > _MOST_FACTS:
        _facts.popitem(last=False)
    return known[1]


def _written(*paths: Path | None) -> tuple[tuple[int, int], ...]:
    """Returns the time of the last change and the size of each file that exists."""
    stats = [path.stat() for path in paths if path is not None]
    return tuple((stat.st_mtime_ns, stat.st_size) for stat in stats)


def overview_of(roots: Roots, run: str) -> dict[str, Any]:
    """Returns the state of a run from its files."""
    return to_json(overview(facts_of(roots, run)))


def fork_steps(roots: Roots, runs: Sequence[str]) -> dict[str, int]:
    """Returns the step that a fork follows, by run; 0 for other runs."""
    return {run: RunFolder(run, roots).fork_step() for run in runs}


def series_of(roots: Roots, run: str, names: Sequence[str], points: int) -> dict[str, Any]:
    """Returns metrics in at most `points` buckets."""
    return series(facts_of(roots, run).rows, names, points)


def news_of(roots: Roots, run: str, after_step: int) -> dict[str, Any]:
    """Returns what changed in a run's files since a step."""
    rows = facts_of(roots, run).rows
    last = rows[-1]["step"] if rows else 0
    return {"steps": flat_rows(rows, after_step), "last_step": last, "overview": overview_of(roots, run)}


# --- Groups ----------------------------------------------------------------------------------------------------
def step_of(roots: Roots, run: str, step: int) -> dict[str, Any]:
    """Returns the metrics and the groups of a step. Raises ViewError for a step that the run has not done."""
    rows = facts_of(roots, run).rows
    metrics = next((dict(flat(row)) for row in rows if row["step"] == step), None)
    groups = rows_of(
        roots,
        run,
        "SELECT group_id, any_value(env_id) AS env_id, any_value(row) AS row, "
        "list(reward ORDER BY sequence) AS rewards, list(sequence ORDER BY sequence) AS sequences, "
        "mode(outcome) AS outcome, any_value(outcome_reason) AS reason, any_value(staleness) AS staleness, "
        f"right(any_value(prompt), {_READ}) AS prompt_start FROM rollouts "
        f"WHERE step = {step:d} AND outcome <> 'evaluation' AND {_ONE_ROW_EACH} "
        "GROUP BY group_id ORDER BY row, group_id LIMIT 4096",
    )
    if metrics is None and not groups:
        last = rows[-1]["step"] if rows else 0
        raise ViewError("step_missing", f"The run {run} has no step {step}.", remedy=f"Its last step is {last}.")
    answer = {"step": step, "metrics": metrics or {}, "groups": groups}
    if not groups:
        answer["recorded"] = _knows_steps(roots, run)
    for group in groups:
        group["prompt_start"] = question(group["prompt_start"] or "")[:_SHOWN]
        scored = [pair for pair in zip(group["rewards"], group["sequences"], strict=True) if pair[0] is not None]
        known = group["rewards"] = [value for value, _ in scored]
        group["sequences"] = [sequence for _, sequence in scored]
        group["same"] = len(known) > 1 and max(known) - min(known) < 1e-9
    return answer


def timeline_of(roots: Roots, run: str, step: int) -> Timeline:
    """Returns the work and the waits of a step. Raises ViewError for a step without times."""
    times = window(facts_of(roots, run).rows, step)
    rows = rows_of(
        roots,
        run,
        "SELECT group_id, coalesce(any_value(env_id), 'env') AS env_id, max(submitted_ms) / 1000 AS ended, "
        f"max(seconds) AS seconds FROM rollouts WHERE submitted_ms >= {times.start * 1000!r} "
        f"AND submitted_ms - seconds * 1000 <= {times.end * 1000!r} AND outcome <> 'evaluation' "
        f"GROUP BY group_id ORDER BY ended, group_id LIMIT {MOST_GROUPS + 1}",
    )
    works = [
        Work(shown_id(one["group_id"]), one["env_id"], one["ended"] - one["seconds"], one["ended"]) for one in rows
    ]
    return timeline(times, works)


def _knows_steps(roots: Roots, run: str) -> bool:
    """Returns False if the run has trained groups, and the step of each of them is unknown."""
    (found,) = rows_of(
        roots, run, "SELECT count(*) AS rows, count(step) AS steps FROM rollouts WHERE acked", update=False
    )
    return found["steps"] > 0 or not found["rows"]


def group_of(roots: Roots, run: str, group_id: str) -> dict[str, Any]:
    """Returns a group with the tokens of its completions. Raises ViewError for an unknown group."""
    group_id = group_id.replace("~", "/")
    rows = rows_of(
        roots, run, f"SELECT * FROM rollouts WHERE group_id = {literal(group_id)} ORDER BY sequence LIMIT 1024"
    )
    if not rows:
        raise ViewError(
            "group_missing",
            f"The run {run} has no group {group_id!r} on disk.",
            remedy="A group appears when a checkpoint covers its step. Search the rollouts.",
        )
    group = groups.group_json(rows, read_tokenizer(folder_of(roots, run).tokenizer()))
    if rows[0]["index"] is not None and rows[0]["outcome"] != "evaluation":
        group["seen"] = _seen(roots, run, rows[0]["source"], rows[0]["index"])
    return group


def _seen(roots: Roots, run: str, source: str | None, index: int) -> str:
    """Returns the difficulty of a row of the data, as the page shows it behind the row's index; "" without a reward."""
    of = "source IS NULL" if source is None else f"source = {literal(source)}"
    chosen = f"SELECT groups, reward FROM difficulty WHERE index = {index:d} AND {of}"
    known = rows_of(roots, run, chosen, update=False)
    if not known:
        return ""
    return f": reward {known[0]['reward']:.3g} lately, {known[0]['groups']} group{'s' * (known[0]['groups'] > 1)}"


def prompt_of(roots: Roots, run: str, group_id: str, of: str) -> dict[str, Any]:
    """Returns the groups of `run` whose prompt is the prompt of a group of the run `of`. Raises ViewError."""
    group_id = group_id.replace("~", "/")
    chosen = f"group_id = {literal(group_id)} AND prompt IS NOT NULL"
    known = rows_of(roots, of, f"SELECT prompt FROM rollouts WHERE {chosen} ORDER BY sequence LIMIT 1")
    if not known:
        raise ViewError(
            "prompt_missing",
            f"The prompt of group {group_id!r} of the run {of} is not on disk.",
            remedy="Choose another group. A run without tokenizer.json in its folder has no texts.",
        )
    text = known[0]["prompt"]
    found = rows_of(
        roots,
        run,
        "SELECT step, group_id, mode(outcome) AS outcome, any_value(outcome_reason) AS reason, "
        f"list(reward ORDER BY sequence) FILTER (reward IS NOT NULL)[1:{_MOST_REWARDS}] AS rewards, "
        f"arg_max(left(completion, {_EXCERPT}), reward) AS best, "
        f"arg_min(left(completion, {_EXCERPT}), reward) AS worst, count(*) OVER () AS total "
        f"FROM rollouts WHERE prompt = {literal(text)} AND {_ONE_ROW_EACH} "
        f"GROUP BY step, group_id ORDER BY step DESC NULLS LAST, group_id DESC LIMIT {_MOST_GROUPS}",
        update=run != of,
    )
    found.sort(key=lambda group: (group["step"] is None, group["step"], group["group_id"]))
    total = found[0]["total"] if found else 0
    for group in found:
        del group["total"]
        group["group_id"] = shown_id(group["group_id"])
        group["rewards"] = group["rewards"] or []
    return {"question": question(text[-_READ:])[:_SHOWN], "total": total, "groups": found}


# --- The list of rollouts --------------------------------------------------------------------------------------
def rollouts_of(roots: Roots, run: str, query: RolloutQuery) -> dict[str, Any]:
    """Returns a page of rollouts and the histogram of the rewards of all that fit the query.

    A rollout with branches is there once, as the last branch that fits the query.
    """
    chosen = conditions(query)
    (most,) = rows_of(roots, run, "SELECT max(branch) AS branch FROM rollouts")
    if most["branch"]:
        chosen += (
            " AND (sequence IS NULL OR (group_id, sequence) IN (SELECT (group_id, max(sequence)) FROM rollouts "
            f"WHERE {chosen} GROUP BY group_id, coalesce(rollout, sequence)))"
        )
    bars = rows_of(
        roots,
        run,
        f"WITH chosen AS (SELECT reward FROM rollouts WHERE {chosen}), ends AS (SELECT min(reward) AS low, "
        "max(reward) AS high FROM chosen) SELECT count(*) AS number, any_value(low) AS low, any_value(high) AS high, "
        f"least({_BARS - 1}, floor((reward - low) / nullif(high - low, 0) * {_BARS}))::INTEGER AS bar, "
        "bool_and(reward IS NULL) AS unscored FROM chosen, ends GROUP BY bar, reward IS NULL",
        update=False,
    )
    scored = [bar for bar in bars if not bar["unscored"]]
    histogram: list[dict[str, float]] = []
    if scored and scored[0]["bar"] is None:
        histogram = [{"low": scored[0]["low"], "high": scored[0]["high"], "count": scored[0]["number"]}]
    elif scored:
        low, width = scored[0]["low"], (scored[0]["high"] - scored[0]["low"]) / _BARS
        counts = {bar["bar"]: bar["number"] for bar in scored}
        histogram = [
            {"low": low + at * width, "high": low + (at + 1) * width, "count": counts.get(at, 0)} for at in range(_BARS)
        ]
    order = query.order.removeprefix("-")
    way = "DESC" if query.order.startswith("-") else "ASC"
    rows = rows_of(
        roots,
        run,
        f"SELECT {_COLUMNS} FROM rollouts WHERE {chosen} ORDER BY {order} {way} NULLS LAST, group_id {way}, sequence "
        f"LIMIT {query.limit:d} OFFSET {query.offset:d}",
        update=False,
    )
    several = _branches(roots, run, {row["group_id"] for row in rows}) if most["branch"] else {}
    for row in rows:
        row["reward_parts"] = dict(row["reward_parts"] or ())
        row["branches"] = several.get((row["group_id"], row["rollout"]), 1)
        row["group_id"] = shown_id(row["group_id"])
        row["prompt"] = row["prompt"] and question(row["prompt"])[:_SHOWN]
    page = {"total": sum(bar["number"] for bar in bars), "rows": rows, "histogram": histogram}
    if not rows and (query.step_from is not None or query.step_to is not None):
        page["recorded"] = _knows_steps(roots, run)
    return page


def _branches(roots: Roots, run: str, group_ids: set[str]) -> dict[tuple[str, int], int]:
    """Returns the number of branches of the rollouts of some groups that have more than one."""
    if not group_ids:  # SQL has no empty list
        return {}
    found = rows_of(
        roots,
        run,
        f"SELECT group_id, rollout, count(*) AS branches FROM rollouts WHERE group_id IN "
        f"({', '.join(map(literal, group_ids))}) AND rollout IS NOT NULL "
        "GROUP BY group_id, rollout HAVING branches > 1",
        update=False,
    )
    return {(row["group_id"], row["rollout"]): row["branches"] for row in found}


def highlights_of(roots: Roots, run: str, steps: Sequence[int]) -> list[dict[str, Any]]:
    """Returns the best and the worst rollout of some steps."""
    folder = folder_of(roots, run)
    with as_view_errors():
        with needs_tables():
            from gristmill_view.highlights import highlights
        return highlights(folder, steps)


def download(roots: Roots, run: str, query: RolloutQuery, kind: Download) -> str:
    """Writes the selected rollouts to a temporary file next to the table, and returns its path. JSONL has no lists.

    An update of the table removes the file of a process that was killed. Raises ViewError if the disk is full.
    """
    columns = "*" if kind is Download.PARQUET else _NO_LISTS
    order = query.order.removeprefix("-")
    way = "DESC" if query.order.startswith("-") else "ASC"
    table = table_of(
        roots,
        run,
        f"SELECT {columns} FROM rollouts WHERE {conditions(query)} "
        f"ORDER BY {order} {way} NULLS LAST, group_id, sequence",
    )
    folder = folder_of(roots, run).writable(load_table_reader().DATASET_FOLDER)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix="download-", suffix=f".{kind}", delete=False) as file:
            try:
                _write_rows(table, kind, file)
                file.flush()
            except BaseException:
                Path(file.name).unlink()
                raise
    except OSError as error:
        raise ViewError(
            "download_not_written",
            f"The download cannot be written to {folder}: {error.strerror}.",
            status=507,
            remedy="Make space on that disk, or select fewer rollouts.",
        ) from error
    return file.name


def _write_rows(table: Any, kind: Download, file: IO[bytes]) -> None:
    if kind is Download.PARQUET:
        import pyarrow.parquet

        pyarrow.parquet.write_table(table, file, compression="zstd")
        return
    for batch in table.to_batches(4096):
        for row in batch.to_pylist():
            row["reward_parts"] = dict(row["reward_parts"] or ())
            file.write(msgspec.json.encode(row) + b"\n")


def conditions(query: RolloutQuery) -> str:
    """Returns the filters as SQL. Every value of the request is a number or a quoted text."""
    clauses = ["true"]
    for column, low, high in (
        ("step", query.step_from, query.step_to),
        ("reward", query.reward_min, query.reward_max),
        (f"map_extract(reward_parts, {literal(query.part or '')})[1]", query.part_min, query.part_max),
    ):
        if low is not None:
            clauses.append(f"{column} >= {low!r} - {_slack(low)!r}")
        if high is not None:
            clauses.append(f"{column} <= {high!r} + {_slack(high)!r}")
    if query.part is not None:
        clauses.append(f"map_extract(reward_parts, {literal(query.part)})[1] IS NOT NULL")
    if query.group is not None:
        clauses.append(f"group_id = {literal(query.group.replace('~', '/'))}")
    for column, value in (("env_id", query.env), ("outcome", query.outcome), ("finish_reason", query.finish_reason)):
        if value is not None:
            clauses.append(f"{column} = {literal(value)}")
    if query.text is not None:
        needle = f"lower({literal(query.text)})"
        clauses.append(f"(contains(lower(completion), {needle}) OR contains(lower(prompt), {needle}))")
    return " AND ".join(clauses)


def _slack(bound: float) -> float:
    """Returns how far a value of the table may be outside a bound: rewards are 32-bit floats, and steps are exact."""
    return 0 if isinstance(bound, int) else 1e-6 * max(1.0, abs(bound))
