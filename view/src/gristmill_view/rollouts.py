"""The table of rollouts: one row per completion that a run generated, with everything that became of it.

`build` makes or updates the Parquet files in `<run>/dataset` from the archive, the trainer's records, the dropped
groups and the evaluations. It reads only what is new since the last time. `rows.py` makes the rows of one group.
docs/look-at-a-run.md explains the columns.

A row is final when nothing more can become of its group. Final rows are in `part-*.parquet`. The other rows are in the
newest `open-*.parquet`, which each update writes again: dead letters, groups of a step that no checkpoint covers yet,
and unfinished evaluations.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq

from gristmill.archive import segment
from gristmill.archive.dropped import DroppedContents
from gristmill.archive.drops import Drop, read_drops
from gristmill.archive.trained import TrainedGroup
from gristmill.errors import GristmillError
from gristmill.folders import EVALUATION_RESULTS_FILE, RunFolder
from gristmill.internal import foreign, metrics
from gristmill.internal.disk import write_file
from gristmill.run import MOST_GROUPS_OF_ROW
from gristmill_view.pack import open_run
from gristmill_view.rows import (
    OTHER_TRAINING,
    SCHEMA,
    SCHEMA_VERSION,
    Rows,
    Texts,
    evaluation_rows,
    group_number,
    new_frames,
    read_submitted,
)
from gristmill_view.series import flat

__all__ = ["SCHEMA", "SCHEMA_VERSION", "Completeness", "build", "dataset", "sql"]

_LOG = logging.getLogger(__name__)
DATASET_FOLDER = "dataset"
_STATE, _LOCK = "state.json", ".lock"
_WAIT_FOR_RECORD = 1024
"""Archived groups that wait for their trainer's record. If more wait, the oldest become final without one."""
_ROWS_AT_ONCE, _TOKENS_AT_ONCE = 4096, 4 << 20
"""Rows and tokens that are Python objects at a time."""
_PART_BYTES = 256 << 20
"""Size in memory at which rows become a part, however many rows are new."""
_GROUP_ROWS = 8192
_SMALL_BYTES, _SMALL_PARTS = 4 << 20, 16
"""So many last parts of fewer bytes than this become one part."""
SAME_SCORES = "same_scores"
"""Why an environment drops a group whose rewards are all the same."""
_GARBAGE_S = 600
"""A file that an update replaced stays this long for readers that have its name, and a download that nobody read."""


class Completeness(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of the table, counted in groups, and the gaps that it knows of."""

    run: str
    trained: int
    """Acked groups whose rows have their content."""
    lost: int
    """Acked groups that the archive let go before they were read. Their rows say so and have no tokens."""
    dropped: int
    dead: int
    """Dead letters."""
    leased: int
    """Groups of a step that no checkpoint covers yet."""
    evaluations: int
    """Evaluated prompts."""
    rows: int
    """Rows of the table."""
    without_record: int
    """Acked groups without the record of the trainer: their step, advantages and log-probabilities are unknown."""
    rows_issued: int | None
    """Data set rows up to the highest one that is known; None for Atropos' protocol, which has no row numbers."""
    unaccounted: int
    """Of these, rows without any trace: still in generation or in the queue, abandoned at the end of the run, or passed
    over by the run's curriculum."""
    damaged: list[str]
    """Files with a damaged place. The groups after that place are not in the table."""

    def __str__(self) -> str:
        whole = f"run {self.run}: {self.trained} acked groups with their content, {self.lost} that the archive let go, "
        whole += f"{self.dropped} dropped, {self.dead} dead letters, {self.leased} not acked yet; {self.rows} rows. "
        if self.without_record:
            whole += f"{self.without_record} acked groups have no record of the trainer. "
        if self.damaged:
            whole += f"Groups are missing, because files are damaged: {', '.join(self.damaged)}. "
        if self.rows_issued is None:
            return whole + "Atropos' protocol has no row numbers, so groups without a trace cannot be counted."
        return whole + f"Of {self.rows_issued} data set rows, {self.unaccounted} have no trace."


def build(run: str | Path | RunFolder, *, roots: Iterable[str | Path] | None = None) -> Completeness:
    """Makes or updates the table of a run, and returns what it holds. The run may be open, crashed or finished.

    Raises RunMissingError.
    """
    source = open_run(run, roots)
    folder = source.writable(DATASET_FOLDER)
    with _locked(folder):
        return _Builder(source, folder).update()


def dataset(
    run: str | Path | RunFolder, *, roots: Iterable[str | Path] | None = None, update: bool = True
) -> pads.Dataset:
    """Returns the table of a run as a pyarrow dataset, which reads only the columns and rows that are asked for.

    `update`: read what is new in the run's folder first. A run that was deleted and created again under its id has the
    rows of both; column `creation` distinguishes them.
    """
    source = open_run(run, roots)
    files = _files(source, update=update)
    if not files:
        return pads.dataset(SCHEMA.empty_table())
    return pads.dataset([str(file) for file in files], schema=SCHEMA, format="parquet")


def sql(
    run: str | Path | RunFolder, query: str, *, roots: Iterable[str | Path] | None = None, update: bool = True
) -> pa.Table:
    """Returns the result of a DuckDB query as a table. `.to_pylist()` converts it.

    The query may use `rollouts` (the rows of the run's newest creation), `all_rollouts` (the rows of all its
    creations), `difficulty` (one row per row of the data, with its mean reward) and `steps` (the trainer's metrics,
    with names such as `seconds_train`). Raises SqlError for a query that DuckDB refuses.
    """
    source = open_run(run, roots)
    files = _files(source, update=update)
    with duckdb.connect(":memory:") as connection:
        connection.execute("SET TimeZone = 'UTC'")
        if files:
            names = ", ".join("'" + str(file).replace("'", "''") + "'" for file in files)
            connection.execute(f"CREATE VIEW all_rollouts AS SELECT * FROM read_parquet([{names}])")
        else:
            connection.register("all_rollouts", SCHEMA.empty_table())
        state = _read_state(source.writable(DATASET_FOLDER))
        newest = state.creation if state is not None else 0
        connection.execute(f"CREATE VIEW rollouts AS SELECT * FROM all_rollouts WHERE creation IN (0, {newest})")
        connection.execute(f"CREATE VIEW difficulty AS {_difficulty(source)}")
        connection.register("steps", _steps(source))
        try:
            relation = connection.sql(query)
            if relation is not None:
                return relation.to_arrow_table()
        except duckdb.Error as error:
            raise SqlError("sql_failed", f"DuckDB refuses the query: {error}") from error
    raise SqlError("sql_without_result", "the query has no result; write a SELECT")


def _difficulty(source: RunFolder) -> str:
    """Returns the query of the view `difficulty`. Its `reward` is over the groups that the run's curriculum counts."""
    record = source.record()
    settings = record.env.get("curriculum") if record is not None else None
    groups = settings.get("window") if isinstance(settings, dict) else None
    last = groups if isinstance(groups, int) and 0 < groups <= MOST_GROUPS_OF_ROW else 1
    return (
        "WITH played AS (SELECT source, index, group_id, avg(reward) AS reward, max(submitted_ms) AS ended, "
        "max(step) AS step, any_value(prompt) AS prompt FROM rollouts WHERE index IS NOT NULL AND reward IS NOT NULL "
        "AND coalesce(branch, 0) = 0 AND outcome <> 'evaluation' "
        f"AND (outcome <> 'dropped' OR acked OR outcome_reason = '{SAME_SCORES}') GROUP BY source, index, group_id), "
        "counted AS (SELECT *, row_number() OVER (PARTITION BY source, index ORDER BY ended DESC, group_id DESC) "
        "AS age FROM played) SELECT source, index, count(*) AS groups, "
        f"avg(reward) FILTER (age <= {last}) AS reward, avg(reward) AS reward_all, max(step) AS step, "
        "any_value(prompt) AS prompt FROM counted GROUP BY source, index"
    )


class SqlError(GristmillError):
    """A query that DuckDB refuses."""


@dataclass(frozen=True)
class _Place:
    """Where a record begins in a segment."""

    file: str
    offset: int


class _State(msgspec.Struct, kw_only=True):
    """The position up to which each file is read, and the groups that are not final: dataset/state.json."""

    schema_version: int = SCHEMA_VERSION
    creation: int = 0
    """The newest creation of the run, ms."""
    parts: list[tuple[int, int, int]] = []
    """Number, rows and bytes of each part."""
    opened: int = 0
    """Number of the file with the rows that are not final; 0: none yet."""
    archive: dict[str, int] = {}
    """Bytes that are read of each segment, by creation and file."""
    trained: dict[str, int] = {}
    drops: dict[str, tuple[int, int]] = {}
    """Inode and bytes that are read of each file: a full file is renamed."""
    evaluations: list[str] = []
    """Folders of evaluations whose rows are final."""
    records: dict[str, _Place] = {}
    """Trainer's records of groups that are not archived yet."""
    submitted: dict[str, _Place] = {}
    """Archived groups that wait for their trainer's record."""
    dead: dict[str, Drop] = {}
    done: list[tuple[int, int]] = []
    """Data set rows whose group is final, as ranges [first, last]."""
    done_names: list[str] = []
    """Ids of final groups of Atropos' protocol."""
    groups: dict[str, int] = {}
    """Final groups by kind."""


class _Builder:
    """One update. Groups of the newest creation are compared by id; earlier creations are final."""

    def __init__(self, source: RunFolder, folder: Path) -> None:
        self._source = source
        self._folder = folder
        self._state = _read_state(folder) or _State()
        self._done = _Ids(self._state.done, self._state.done_names)
        self._texts = Texts(source.tokenizer())
        self._rows = Rows(source.run_id, self._texts, source.record())
        self._paths = {path.name: path for path in source.archive_segments()}
        self._trained_paths = {path.name: path for path in source.trained_segments()}
        self._written: list[pa.Table] = []
        self._damaged: list[str] = []

    def update(self) -> Completeness:
        record = self._source.record()
        if record is not None:  # The new run may have no group yet.
            self._begin_creation(record.created_ms)
        # The trainer records a group before it is acked and archived, so the records are read first.
        self._read_records()
        self._read_drops()
        self._read_archive()
        self._settle_submitted()
        self._read_evaluations(finished=True)
        final = self._take_rows()
        counts = self._open_rows()
        opened = self._take_rows()
        self._write(final, opened)
        self._remove_garbage()
        return self._completeness(counts, len(opened))

    def _write(self, final: pa.Table, opened: pa.Table) -> None:
        """Adds final rows to the table, replaces the rows that are not final, and writes the state."""
        before = _state_files(self._folder, self._state)
        self._write_final(final)
        self._state.opened += 1
        pq.write_table(opened, self._folder / _open_name(self._state.opened), compression="zstd")
        self._state.done, self._state.done_names = self._done.ranges(), self._done.names()
        for path in {*before}.difference(_state_files(self._folder, self._state)):
            with suppress(FileNotFoundError):  # A person may delete the table.
                os.utime(path)  # `_remove_garbage` removes the file `_GARBAGE_S` after this time.
        # A crash before this line leaves files that the state does not name. The next update writes them again.
        write_file(self._folder / _STATE, msgspec.json.encode(self._state))

    def _write_final(self, final: pa.Table) -> None:
        if not len(final):
            return
        parts = self._state.parts
        number = parts[-1][0] + 1 if parts else 1
        small = 0
        while small < len(parts) and parts[-1 - small][2] < _SMALL_BYTES:
            small += 1
        if small >= _SMALL_PARTS:
            merged = [pq.read_table(self._folder / _part_name(part), schema=SCHEMA) for part, _, _ in parts[-small:]]
            final = pa.concat_tables([*merged, final])
            del parts[-small:]
        path = self._folder / _part_name(number)
        pq.write_table(final, path, compression="zstd", row_group_size=_GROUP_ROWS)
        parts.append((number, len(final), path.stat().st_size))

    def _remove_garbage(self) -> None:
        used = {path.name for path in _state_files(self._folder, self._state)}
        for path in self._folder.iterdir():
            garbage = path.suffix in (".parquet", ".jsonl") and path.name not in used
            if garbage and path.stat().st_mtime < time.time() - _GARBAGE_S:
                path.unlink()

    def _read_records(self) -> None:
        for name, start, created_ms, frames, head in new_frames(
            self._trained_paths.values(), self._state.trained, self._damaged
        ):
            self._begin_creation(created_ms)
            records = segment.parse(frames, head)
            if created_ms == self._state.creation and records.group_id not in self._done:
                self._state.records[records.group_id] = _Place(name, start)

    def _read_drops(self) -> None:
        for path in self._source.drops():
            inode, size = (stat := path.stat()).st_ino, stat.st_size
            # The content of these drops was written before them, and it is searched later than `size` was read.
            contents = DroppedContents(self._source.folders)
            # The file that was read so far may have been renamed meanwhile.
            start = next((read for known, read in self._state.drops.values() if known == inode and read <= size), 0)
            end = start
            for drop, end in read_drops(path, start, size):  # noqa: B007
                self._begin_creation(drop.creation)
                if drop.creation == self._state.creation:
                    self._take_drop(drop, contents)
            self._state.drops[path.name] = (inode, end)

    def _take_drop(self, drop: Drop, contents: DroppedContents) -> None:
        if drop.group_id in self._done or drop.group_id in self._state.submitted:
            return  # Its content was read before the archive let it go.
        if drop.what == "replayed":
            self._state.dead.pop(drop.group_id, None)
        elif drop.what == "dead":
            self._state.dead[drop.group_id] = drop
        else:
            record = self._take_record(drop.group_id)
            self._finish(drop.group_id, "lost" if drop.what == "let_go" else "dropped")
            if drop.what == "let_go" and record is None:
                self._count("without_record")
            content = contents.of(drop)
            if content is None:
                self._rows.add_absent(drop, record if drop.what == "let_go" else None)
            else:
                self._rows.add_saved(
                    content, "dropped", drop.creation, drop.group_id, row=drop.row, reason=drop.reason,
                    env_id=drop.env_id, submitted_ms=drop.time_ms,
                )  # fmt: skip
            self._flush()

    def _read_archive(self) -> None:
        records_are_kept = bool(self._trained_paths)
        for name, start, created_ms, frames, head in new_frames(
            self._paths.values(), self._state.archive, self._damaged
        ):
            self._begin_creation(created_ms)
            parsed = segment.parse(frames, head)
            if created_ms < self._state.creation:
                self._rows.add(read_submitted(parsed, self._source.run_id), created_ms, None)
                continue
            if parsed.group_id in self._done or parsed.group_id in self._state.submitted:
                continue
            record = self._take_record(parsed.group_id)
            if record is None and records_are_kept:
                self._state.submitted[parsed.group_id] = _Place(name, start)
                self._state.dead.pop(parsed.group_id, None)
                continue
            self._add_archived(parsed, record)

    def _settle_submitted(self) -> None:
        """Makes archived groups final that have got their record, and the oldest if too many wait for one."""
        waiting = list(self._state.submitted)
        for number, group_id in enumerate(waiting):
            record = self._take_record(group_id)
            if record is not None or number < len(waiting) - _WAIT_FOR_RECORD:
                self._finish_submitted(group_id, record)

    def _finish_submitted(self, group_id: str, record: TrainedGroup | None) -> None:
        archived = self._archived(self._state.submitted.pop(group_id))
        if archived is not None:
            self._add_archived(archived, record)

    def _add_archived(self, found: segment.ArchivedGroup, record: TrainedGroup | None) -> None:
        self._state.dead.pop(found.group_id, None)
        self._finish(found.group_id, "trained")
        if record is None:
            self._count("without_record")
        self._rows.add(read_submitted(found, self._source.run_id), self._state.creation, record)
        self._flush()

    def _open_rows(self) -> Counter[str]:
        """Adds the rows that are not final. Returns their groups by kind."""
        counts: Counter[str] = Counter()
        for place in self._state.submitted.values():
            archived = self._archived(place)
            if archived is not None:
                self._rows.add(read_submitted(archived, self._source.run_id), self._state.creation, None)
                counts.update(["trained", "without_record"])
        for drop in self._state.dead.values():
            self._rows.add_absent(drop, None)
            counts["dead"] += 1
        for group_id in self._state.records:
            record = self._record(self._state.records[group_id])
            if record is not None and group_id not in self._state.dead:
                self._rows.add_leased(record, self._state.creation)
                counts["leased"] += 1
        before = self._state.groups.get("evaluations", 0)
        self._read_evaluations(finished=False)
        counts["evaluations"] = self._state.groups.get("evaluations", 0) - before
        self._state.groups["evaluations"] = before
        return counts

    def _read_evaluations(self, *, finished: bool) -> None:
        record = self._source.record()
        for folder in self._source.evaluations():
            if folder.name in self._state.evaluations or foreign.is_file(folder / EVALUATION_RESULTS_FILE) != finished:
                continue
            mine = self._source.made(folder, record)
            prompts = evaluation_rows(self._rows, folder, self._state.creation if mine else OTHER_TRAINING)
            self._count("evaluations", prompts)
            if finished:
                self._state.evaluations.append(folder.name)
                self._flush()

    def _begin_creation(self, created_ms: int) -> None:
        """Forgets the ids of the creation before: its groups are as they are now."""
        if created_ms <= self._state.creation:
            return
        for group_id in list(self._state.submitted):
            self._finish_submitted(group_id, None)
        self._state.creation = created_ms
        self._state.records, self._state.submitted, self._state.dead = {}, {}, {}
        self._state.groups = {}
        self._done = _Ids([], [])

    def _take_record(self, group_id: str) -> TrainedGroup | None:
        place = self._state.records.pop(group_id, None)
        return None if place is None else self._record(place)

    def _record(self, place: _Place) -> TrainedGroup | None:
        record = _read_at(self._trained_paths, place)
        return None if record is None else TrainedGroup.decode(record.body)

    def _archived(self, place: _Place) -> segment.ArchivedGroup | None:
        return _read_at(self._paths, place)

    def _finish(self, group_id: str, kind: str) -> None:
        self._done.add(group_id)
        self._state.dead.pop(group_id, None)
        self._count(kind)

    def _count(self, kind: str, more: int = 1) -> None:
        self._state.groups[kind] = self._state.groups.get(kind, 0) + more

    def _flush(self) -> None:
        """Bounds the memory of final rows, and the work that a killed update loses.

        Groups of the rows that are not final may be final now, so the table has none of these rows until `update` ends.
        """
        if len(self._rows) >= _ROWS_AT_ONCE or self._rows.tokens >= _TOKENS_AT_ONCE:
            self._written.append(self._rows.take())
            if sum(table.nbytes for table in self._written) >= _PART_BYTES:
                self._write(self._take_rows(), SCHEMA.empty_table())

    def _take_rows(self) -> pa.Table:
        tables, self._written = [*self._written, self._rows.take()], []
        return pa.concat_tables(tables)

    def _completeness(self, opened: Counter[str], open_rows: int) -> Completeness:
        groups = Counter(self._state.groups) + opened
        known = _Ids(self._done.ranges(), [])
        for group_id in (*self._state.submitted, *self._state.dead, *self._state.records):
            known.add(group_id)
        return Completeness(
            run=self._source.run_id,
            trained=groups["trained"],
            lost=groups["lost"],
            dropped=groups["dropped"],
            dead=groups["dead"],
            leased=groups["leased"],
            evaluations=groups["evaluations"],
            rows=sum(rows for _, rows, _ in self._state.parts) + open_rows,
            without_record=groups["without_record"],
            rows_issued=None if known.highest is None else known.highest + 1,
            unaccounted=known.missing,
            damaged=self._damaged,
        )


class _Ids:
    """Ids of groups. Permits number them, so that a few ranges hold the ids of a long run."""

    def __init__(self, ranges: Iterable[tuple[int, int]], names: Iterable[str]) -> None:
        self._numbers = {number for first, last in ranges for number in range(first, last + 1)}
        self._names = set(names)

    def add(self, group_id: str) -> None:
        number = group_number(group_id)
        if number is None:
            self._names.add(group_id)
        else:
            self._numbers.add(number)

    def __contains__(self, group_id: str) -> bool:
        number = group_number(group_id)
        return group_id in self._names if number is None else number in self._numbers

    @property
    def highest(self) -> int | None:
        return max(self._numbers, default=None)

    @property
    def missing(self) -> int:
        """How many numbers below the highest are not here."""
        return 0 if self.highest is None else self.highest + 1 - len(self._numbers)

    def ranges(self) -> list[tuple[int, int]]:
        ranges: list[tuple[int, int]] = []
        for number in sorted(self._numbers):
            if ranges and ranges[-1][1] == number - 1:
                ranges[-1] = (ranges[-1][0], number)
            else:
                ranges.append((number, number))
        return ranges

    def names(self) -> list[str]:
        return sorted(self._names)


def _read_at(paths: dict[str, Path], place: _Place) -> segment.ArchivedGroup | None:
    """Returns the group at a place; None if its segment was removed."""
    path = paths.get(place.file)
    if path is None or not foreign.is_file(path):
        return None
    with foreign.open_file(path) as file:
        file.seek(place.offset)
        frame = next(segment.read_frames(file, str(path)), None)
    return None if frame is None else segment.parse(frame[0], frame[1])


def _files(source: RunFolder, *, update: bool) -> list[Path]:
    folder = source.writable(DATASET_FOLDER)
    if update:
        build(source)
    state = _read_state(folder)
    return [] if state is None else _state_files(folder, state)


def _state_files(folder: Path, state: _State) -> list[Path]:
    """Returns the files of the table as of this state."""
    names = [_part_name(number) for number, _, _ in state.parts]
    return [folder / name for name in (*names, *([_open_name(state.opened)] if state.opened else []))]


def _part_name(number: int) -> str:
    return f"part-{number:06}.parquet"


def _open_name(number: int) -> str:
    return f"open-{number:06}.parquet"


def _read_state(folder: Path) -> _State | None:
    """Returns the state. None if it does not exist, or has another schema version: the table is then made again."""
    try:
        state = msgspec.json.decode(foreign.read_file(folder / _STATE), type=_State)
    except (FileNotFoundError, ValueError):
        return None
    return state if state.schema_version == SCHEMA_VERSION else None


def _steps(source: RunFolder) -> pa.Table:
    rows = [dict(flat(row, separator="_")) for row in source.metrics()]
    names = list(dict.fromkeys(name for row in rows for name in row))
    if "step" not in names:
        names.insert(0, "step")
    columns = {name: [row.get(name) for row in rows] for name in names}
    return pa.table({name: _column(name, values) for name, values in columns.items()})


def _column(name: str, values: list[Any]) -> pa.Array:
    if name == "step":
        return pa.array(values, pa.int64())
    if any(isinstance(value, str) for value in values):
        return pa.array([None if value is None else str(value) for value in values], pa.string())
    return pa.array([_float(value) for value in values], pa.float64())


def _float(value: Any) -> float | None:
    return value if isinstance(value, float) else metrics.number(value)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lets one process at a time update the table."""
    handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
