"""The trainer's metrics by step, decimated to the points of a chart: the answer of /view/api/runs/{run}/series."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from gristmill.internal.metrics import number

_Floats = np.ndarray[Any, np.dtype[np.float64]]
_Integers = np.ndarray[Any, np.dtype[np.int64]]
_SAMPLED: Final = 500
"""Rows whose numbers are read to find the metrics of a long run, in addition to one of each set of names."""
_MOST_METRICS: Final = 200
"""Metrics of one answer. With 500 points that is 2 MB at most."""
_MOST_NAMES: Final = 2000


def flat(values: Mapping[str, Any], prefix: str = "", *, separator: str = ".") -> Iterator[tuple[str, Any]]:
    """Yields nested values with separators between the names: `reward_parts.accuracy`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}{separator}", separator=separator)
        else:
            yield f"{prefix}{name}", value


def metric_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the flat names of the numbers in the rows, in the order of their first appearance."""
    names: dict[str, None] = {}
    for row in rows:
        names.update((name, None) for name, value in flat(row) if name != "step" and number(value) is not None)
    return list(names)


def series(rows: Sequence[Mapping[str, Any]], names: Sequence[str], points: int) -> dict[str, Any]:
    """Returns metrics by step in at most `points` buckets: `Series` in source.py has the shape.

    `names`: flat names; a name that ends with `.*` selects a group of metrics, such as `reward_parts.*`. Unknown names
    are left out, and so are metrics beyond the first 200. `min` and `max` are missing if each bucket holds one step. A
    bucket without a number is null.
    """
    sampled = {*range(0, len(rows), max(1, len(rows) // _SAMPLED)), *range(len(rows))[-1:], *_first_of_each_shape(rows)}
    known_names = metric_names([rows[place] for place in sorted(sampled)])
    wanted = list(
        dict.fromkeys(
            name
            for pattern in names
            for name in known_names
            if name == pattern or (pattern.endswith(".*") and name.startswith(pattern[:-1]))
        )
    )[:_MOST_METRICS]
    edges = np.linspace(0, len(rows), min(max(points, 1), len(rows)) + 1).astype(int)
    starts, ends = edges[:-1], edges[1:]
    phases = [name for name in known_names if name.startswith("seconds.")][:_MOST_METRICS]
    table = {name: _column(rows, name) for name in dict.fromkeys([*wanted, *phases, "tokens"])}
    one_each = len(starts) == len(rows)
    bands: dict[str, dict[str, list[float | None]]] = {}
    for name in wanted:
        bands[name] = {"mean": _means(table[name], starts)}
        if not one_each:
            bands[name] |= {
                "min": _listed(np.fmin.reduceat(table[name], starts)),
                "max": _listed(np.fmax.reduceat(table[name], starts)),
            }
    seconds = sum((np.nan_to_num(table[name]) for name in phases), np.zeros(len(rows)))
    sums = {"tokens": np.nan_to_num(table["tokens"]), "seconds": seconds}
    return {
        "step": [int(rows[end - 1]["step"]) for end in ends],
        "sums": {name: np.cumsum(values)[ends - 1].tolist() for name, values in sums.items()},
        "series": bands,
        "phases": {name.removeprefix("seconds."): _means(np.nan_to_num(table[name]), starts) for name in phases},
        "names": known_names[:_MOST_NAMES],
    }


def _first_of_each_shape(rows: Sequence[Mapping[str, Any]]) -> Collection[int]:
    """Returns a row of each set of names, because rare metrics are in few rows."""
    shapes: dict[tuple[object, ...], int] = {}
    for place, row in enumerate(rows):
        inner = (tuple(value) for value in row.values() if isinstance(value, Mapping))
        shapes.setdefault((*row, *inner), place)
    return shapes.values()


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> _Floats:
    """Returns one metric of all rows; NaN if a row has no number."""
    numbers = (number(_value(row, name)) for row in rows)
    return np.array([math.nan if value is None else value for value in numbers], np.float64)


def _value(row: Mapping[str, Any], name: str) -> Any:
    """Returns the value of a flat name in a row that is flat or nested."""
    if name in row:
        return row[name]
    first, dot, rest = name.partition(".")
    inner = row.get(first) if dot else None
    return _value(inner, rest) if isinstance(inner, Mapping) else None


def _means(values: _Floats, starts: _Integers) -> list[float | None]:
    """Returns the mean of the numbers of each bucket. `starts`: the first row of each bucket."""
    if not len(starts):
        return []
    is_number = ~np.isnan(values)
    counts = np.add.reduceat(is_number, starts, dtype=np.int64)
    sums = np.add.reduceat(np.where(is_number, values, 0.0), starts)
    return _listed(np.divide(sums, counts, out=np.full(len(starts), np.nan), where=counts > 0))


def _listed(values: _Floats) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values.tolist()]
