"""Reads the rows of local files: .jsonl, .json, .csv or .parquet.

Of .jsonl, .csv and .parquet only the rows of the split are read, so `train[:100]` of a large file costs as much as a
file of 100 rows. Rows of .jsonl stay in the file, and rows of .parquet are columns in memory. Both become objects when
they are asked for.

An error names the file and, if possible, the line. A column or a key that is there twice is an error, because one value
would replace the other in silence. The package `datasets` does not read these files, because it makes dates of texts
and floats of long integers, and refuses a whole file for one half character.
"""

from __future__ import annotations

import codecs
import csv
import json
import os
import re
import weakref
from array import array
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from zlib import crc32

from gristmill_env.errors import DatasetError
from gristmill_env.values import whole

if TYPE_CHECKING:
    import pyarrow

Row = dict[str, Any]
Columns = dict[str, None]
"""Names, in the order in which they appear."""


class Rows(Protocol):
    """The interface of every source of rows; `datasets.Dataset` and lists of rows implement it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


_LONGEST_CELL = 2**31 - 1
"""Characters per cell; the highest limit that csv accepts on every platform. Its default is only 128 KiB."""
_REST: Any = None
"""The key under which csv returns cells that have no column."""


class FileRows:
    """The rows of one file or of several, each with the columns of all rows that were read.

    A row that lacks a column has None there, as in a table.
    """

    def __init__(self, paths: Sequence[Path], most: int | None) -> None:
        """Reads the files. `most`: rows that are needed, from the first; None: all.

        Raises DatasetError; PermissionError if a file may not be read.
        """
        self._parts: list[tuple[int, Rows]] = []
        """The rows of each file, after the number of rows before them."""
        columns: Columns = {}
        count = 0
        for path in paths:
            if count == most:
                break
            rows = _read(path, None if most is None else most - count, columns)
            self._parts.append((count, rows))
            count += len(rows)
        self._missing = dict.fromkeys(columns)
        self._range = range(count)

    def cut(self, first: int, end: int) -> None:
        """Keeps the rows `first` to `end`."""
        self._range = self._range[first:end]

    def __len__(self) -> int:
        return len(self._range)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Returns a row. Raises DatasetError if the file has changed since it was read."""
        number = self._range[index]
        before, rows = self._parts[bisect(self._parts, number, key=itemgetter(0)) - 1]
        row = rows[number - before]
        return row if row.keys() == self._missing.keys() else {**self._missing, **row}


def _note(columns: Columns, row: Row) -> Row:
    """Adds the names of a row's columns, and returns the row. A damaged name stays in its row."""
    if row.keys() != columns.keys():
        columns |= dict.fromkeys(name for name in row if name == whole(name))
    return row


class _Lines:
    """The rows of a .jsonl file in UTF-8. The file is open, and a row is parsed when it is asked for."""

    def __init__(self, path: Path, most: int | None, columns: Columns) -> None:
        """Parses the rows once, to find damage and `columns`. Raises _BrokenError, OSError."""
        self._path = path
        self._places = array("Q")
        """Where each row begins and ends in the file, one pair after the other."""
        self._checksums = array("I")
        self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._handle)
        with os.fdopen(os.dup(self._handle), "rb") as file:
            start = len(codecs.BOM_UTF8) if file.peek(3).startswith(codecs.BOM_UTF8) else 0
            file.seek(start)
            for number, line in enumerate(file, 1):
                if len(self) == most:
                    break
                if line.strip():
                    _note(columns, _row(line, number))
                    self._places.extend((start, start + len(line)))
                    self._checksums.append(crc32(line))
                start += len(line)

    def __len__(self) -> int:
        return len(self._places) // 2

    def __getitem__(self, index: int) -> Row:
        start, end = self._places[2 * index : 2 * index + 2]
        line = os.pread(self._handle, end - start, start)
        if crc32(line) != self._checksums[index]:
            raise DatasetError(
                "dataset_changed",
                f"row {index} of data set {self._path} has changed since it was read; start the run again",
                path=self._path,
                row=index,
            )
        return _row(line, 1)


class _Arrow:
    """The rows of a .parquet file, as an Arrow table."""

    def __init__(self, table: pyarrow.Table) -> None:
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Row:
        row: Row = self._table.slice(index, 1).to_pylist()[0]
        return row


def _read(path: Path, most: int | None, columns: Columns) -> Rows:
    """Returns the first `most` rows of a file, or all, and adds its `columns`. Raises DatasetError, PermissionError."""
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DatasetError(
            "dataset_suffix",
            f"data set {path}: cannot read '{path.suffix}' files; can read {', '.join(SUFFIXES)}",
            path=path,
            known=list(SUFFIXES),
        )
    try:
        return reader(path, most, columns)
    except PermissionError:
        raise
    except _BrokenError as error:
        text = f"data set {path} cannot be read: line {error.line}: {error}"
        raise DatasetError(error.code, text, path=path, line=error.line, **error.values) from error
    except (OSError, ValueError) as error:
        raise DatasetError("dataset_unreadable", f"data set {path} cannot be read: {error}", path=path) from error


class _BrokenError(Exception):
    """A line that is damaged, or that says something twice."""

    def __init__(self, line: int, reason: object, code: str = "dataset_unreadable", **values: object) -> None:
        super().__init__(str(reason))
        self.line, self.code, self.values = line, code, values


class _TwiceError(Exception):
    """A key that a JSON object has twice."""


def _one_of_each_key(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise _TwiceError(next(name for name in names if names.count(name) > 1))
    return made


_JSON = json.JSONDecoder(object_pairs_hook=_one_of_each_key)


def _is_utf16(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def _lines(path: Path) -> Iterator[str]:
    """Yields the lines of a file in UTF-8, or in UTF-16 with a byte order mark, without changing the ends of lines."""
    encoding = "utf-16" if _is_utf16(path) else "utf-8-sig"
    with path.open(encoding=encoding, errors="surrogateescape", newline="") as file:
        for number, line in enumerate(file, 1):
            if line != whole(line):
                raise _BrokenError(number, _NOT_UTF8)
            yield line


_NOT_UTF8 = "it is not UTF-8; save the file as UTF-8"


def _read_jsonl(path: Path, most: int | None, columns: Columns) -> Rows:
    if not _is_utf16(path):
        return _Lines(path, most, columns)
    texts = ((number, text) for number, text in enumerate(_lines(path), 1) if text.strip())
    return [_note(columns, _row(text.encode(), number)) for number, text in islice(texts, most)]


def _row(line: bytes, number: int) -> Row:
    """Returns the object of a line. Raises _BrokenError."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise _BrokenError(number, _NOT_UTF8) from error
    row, end = _parsed(text, _BLANKS.match(text).end(), number)  # type: ignore[union-attr]
    if rest := text[end:].strip():
        raise _BrokenError(number, f"text after the object: {rest!r:.40}")
    return row


def _read_json(path: Path, most: int | None, columns: Columns) -> Rows:
    return [_note(columns, row) for row in _json_rows(path)[:most]]


def _json_rows(path: Path) -> list[Row]:
    """Reads a list of objects; an object that holds one such list ({"data": [...]}); or one object after another."""
    text = "".join(_lines(path))
    try:
        loaded = _JSON.decode(text)
    except _TwiceError:
        return list(_objects(text))
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # one object per line, as Dataset.to_json and pandas write
            return list(_objects(text))
        raise _BrokenError(error.lineno, f"{error.msg} (column {error.colno})") from error
    if isinstance(loaded, dict):
        lists = [value for value in loaded.values() if isinstance(value, list) and value and isinstance(value[0], dict)]
        if len(lists) == 1:
            loaded = lists[0]
        elif any(isinstance(value, str | int | float) for value in loaded.values()):
            loaded = [loaded]
    if not isinstance(loaded, list):
        raise ValueError("it must hold a list of objects (pandas writes one with orient='records')")
    for number, row in enumerate(loaded):
        if not isinstance(row, dict):
            raise ValueError(f"entry {number}: {_not_a_row(row)}")
    return loaded


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """Yields the objects of a list, or of a text with one object after another."""
    at = _BLANKS.match(text).end()  # type: ignore[union-attr]
    at += text[at] == "["
    while (at := _BETWEEN.match(text, at).end()) < len(text) and text[at] != "]":  # type: ignore[union-attr]
        row, at = _parsed(text, at, 1)
        yield row
    if rest := text[at + 1 :].strip():
        raise _BrokenError(1 + text.count("\n", 0, at), f"text after the list: {rest!r:.40}")


_BLANKS = re.compile(r"\s*")
_BETWEEN = re.compile(r"[\s,]*")


def _parsed(text: str, start: int, line: int) -> tuple[dict[str, Any], int]:
    """Returns the object at `start`, and its end. `line`: the number of the line in which `text` begins."""
    try:
        row, end = _JSON.raw_decode(text, start)
    except _TwiceError as twice:
        at, name = line + text.count("\n", 0, start), str(twice)
        reason = f"the key '{name}' is there twice; rename or remove one"
        raise _BrokenError(at, reason, "duplicate_key", key=name) from twice
    except json.JSONDecodeError as error:
        raise _BrokenError(line + error.lineno - 1, f"{error.msg} (column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits
        raise _BrokenError(line + text.count("\n", 0, start), error) from error
    if not isinstance(row, dict):
        raise _BrokenError(line + text.count("\n", 0, start), _not_a_row(row))
    return row, end


def _not_a_row(value: object) -> str:
    return f"a row is an object with named fields, not {value!r:.40}"


def _read_csv(path: Path, most: int | None, columns: Columns) -> Rows:
    csv.field_size_limit(_LONGEST_CELL)
    rows: list[Row] = []
    reader = csv.DictReader(_lines(path), strict=True)
    try:
        names = list(reader.fieldnames or ())
        _check_columns(names)
        for row in islice(reader, most):
            if (more := row.pop(_REST, None)) is not None:
                reason = f"{len(more)} cells more than the header's {len(names)}; quote a text that holds a comma"
                values = {"surplus": len(more), "columns": len(names)}
                raise _BrokenError(reader.line_num, reason, "too_many_cells", **values)
            rows.append(_note(columns, row))
    except csv.Error as error:
        reason = f"{error}; a quote that begins a cell ends it, too, and a quote inside is written twice"
        raise _BrokenError(reader.line_num + 1, reason) from error
    return rows


def _check_columns(names: Sequence[str]) -> None:
    """Raises _BrokenError if two columns have the same name. Columns without a name may be several."""
    for name in names:
        if name and names.count(name) > 1:
            reason = f"the header has the column '{name}' {names.count(name)} times; rename or remove one"
            raise _BrokenError(1, reason, "duplicate_key", key=name)


def _read_parquet(path: Path, most: int | None, columns: Columns) -> Rows:
    import pyarrow.parquet  # here: slow to import, and few runs need it

    with pyarrow.parquet.ParquetFile(path) as file:
        _check_columns(file.schema_arrow.names)
        columns |= dict.fromkeys(file.schema_arrow.names)
        tables, rows_left = [file.schema_arrow.empty_table()], file.metadata.num_rows if most is None else most
        for number in range(file.num_row_groups):
            if rows_left > 0:
                tables.append(file.read_row_group(number).slice(0, rows_left))
                rows_left -= tables[-1].num_rows
        return _Arrow(pyarrow.concat_tables(tables))


_READERS: Mapping[str, Callable[[Path, int | None, Columns], Rows]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
SUFFIXES = tuple(_READERS)
"""The ends of names of the files that `FileRows` reads, in small letters; large letters mean the same."""
