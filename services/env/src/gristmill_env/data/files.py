"""Reads the rows of one local file: .jsonl, .json, .csv or .parquet.

An error names the file and, if possible, the line. A column or a key that is there twice is an error, because one value
would replace the other in silence.
"""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gristmill_env.errors import DatasetError
from gristmill_env.values import whole

Table = list[dict[str, Any]]

_LONGEST_CELL = 2**31 - 1
"""Characters per cell; the highest limit that csv accepts on every platform. Its default is only 128 KiB."""
_REST: Any = None
"""The key under which csv returns cells that have no column."""


def read_file(path: Path) -> Table:
    """Returns the rows of a file. Raises DatasetError; PermissionError if the file may not be read."""
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DatasetError(
            "dataset_suffix",
            f"data set {path}: cannot read '{path.suffix}' files; can read {', '.join(SUFFIXES)}",
            path=path,
            known=list(SUFFIXES),
        )
    try:
        return reader(path)
    except PermissionError:
        raise
    except _BrokenError as error:
        text = f"data set {path} cannot be read: line {error.line}: {error}"
        raise DatasetError(error.code, text, path=path, line=error.line, **error.values) from error
    except (OSError, ValueError) as error:
        raise DatasetError("dataset_unreadable", f"data set {path} cannot be read: {error}", path=path) from error


def with_all_columns(rows: Table) -> Table:
    """Returns the rows with the columns of all of them. A row that lacks a column has None there, as in a table."""
    columns: dict[str, None] = {}
    for row in rows:
        if row.keys() != columns.keys():
            columns |= dict.fromkeys(name for name in row if name == whole(name))  # a damaged name stays in its row
    missing = dict.fromkeys(columns)
    return [row if row.keys() == columns.keys() else {**missing, **row} for row in rows]


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


def _lines(path: Path) -> Iterator[str]:
    """Yields the lines of a file in UTF-8, or in UTF-16 with a byte order mark, without changing the ends of lines."""
    with path.open("rb") as file:
        start = file.read(2)
    encoding = "utf-16" if start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"
    with path.open(encoding=encoding, errors="surrogateescape", newline="") as file:
        for number, line in enumerate(file, 1):
            if line != whole(line):
                raise _BrokenError(number, "it is not UTF-8; save the file as UTF-8")
            yield line


def _read_jsonl(path: Path) -> Table:
    rows: Table = []
    for number, text in enumerate(_lines(path), 1):
        if text.strip():
            row, end = _parsed(text, _BLANKS.match(text).end(), number)  # type: ignore[union-attr]
            if rest := text[end:].strip():
                raise _BrokenError(number, f"text after the object: {rest!r:.40}")
            rows.append(row)
    return rows


def _read_json(path: Path) -> Table:
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


def _read_csv(path: Path) -> Table:
    csv.field_size_limit(_LONGEST_CELL)
    rows: Table = []
    reader = csv.DictReader(_lines(path))
    try:
        names = list(reader.fieldnames or ())
        _check_columns(names)
        for row in reader:
            if (more := row.pop(_REST, None)) is not None:
                reason = f"{len(more)} cells more than the header's {len(names)}; quote a text that holds a comma"
                values = {"surplus": len(more), "columns": len(names)}
                raise _BrokenError(reader.line_num, reason, "too_many_cells", **values)
            rows.append(row)
    except csv.Error as error:
        raise _BrokenError(reader.line_num + 1, error) from error
    return rows


def _check_columns(names: Sequence[str]) -> None:
    """Raises _BrokenError if two columns have the same name. Columns without a name may be several."""
    for name in names:
        if name and names.count(name) > 1:
            reason = f"the header has the column '{name}' {names.count(name)} times; rename or remove one"
            raise _BrokenError(1, reason, "duplicate_key", key=name)


def _read_parquet(path: Path) -> Table:
    import pyarrow.parquet  # here: slow to import, and few runs need it

    file = pyarrow.parquet.ParquetFile(path)
    _check_columns(file.schema_arrow.names)
    return list(file.read().to_pylist())


_READERS: Mapping[str, Callable[[Path], Table]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
SUFFIXES = tuple(_READERS)
"""The ends of names that `read_file` reads, in small letters; large letters mean the same."""
