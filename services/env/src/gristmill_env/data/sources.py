"""Reads rows from a local file, a folder made by save_to_disk, the hub or the hub's offline cache."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import httpx

from gristmill_env.errors import DatasetError
from gristmill_env.settings import DatasetConfig


class Rows(Protocol):
    """The interface of every source of rows; `datasets.Dataset` and lists of rows implement it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


Table = list[dict[str, Any]]

_LONGEST_CELL = 2**31 - 1
"""Characters per cell; the highest limit that csv accepts on every platform. Its default is only 128 KiB."""
_REST: Any = None
"""The key under which csv returns cells that have no column."""


def load_rows(config: DatasetConfig, config_dir: Path | None) -> tuple[str, Rows]:
    """Returns a label of the data set and split for messages, and the rows.

    Raises DatasetError naming the data set and the places that were searched.
    """
    name, path = config.dataset_name, config.dataset_path
    if name is None and path is None:
        raise DatasetError(
            "dataset_unset", "no data set: set dataset.dataset_name (hub) or dataset.dataset_path (local file)"
        )
    if config.dataset_revision is not None and (path is not None or config.verifiers_id is not None):
        raise DatasetError(
            "revision_not_of_hub",
            "dataset_revision pins a data set on the hub; set dataset_name to one, or leave it out",
        )
    if config.verifiers_id is not None:
        return f"verifiers environment '{config.verifiers_id}' (split {config.split})", _from_verifiers(config)
    if path is None and name is not None:
        if Path(name).suffix not in _READERS and not _exists(name, config_dir):
            return _from_hub(name, config)
        path = name
    assert path is not None
    if config.dataset_revision is not None:
        raise DatasetError(
            "revision_not_of_hub",
            f"dataset_revision pins a data set on the hub, and '{path}' is a local path; leave it out",
        )
    found = _find(path, config_dir)
    label = f"data set '{path}' (split {config.split})"
    if found.is_file():
        return label, _slice(_read(found), config.split, label)
    return label, _from_folder(found, config.split, label)


def _candidates(path: str, config_dir: Path | None) -> list[Path]:
    folders = [Path(), *([config_dir] if config_dir is not None else [])]
    return list(dict.fromkeys((folder / path).absolute() for folder in reversed(folders)))


def _exists(path: str, config_dir: Path | None) -> bool:
    return any(candidate.exists() for candidate in _candidates(path, config_dir))


def _find(path: str, config_dir: Path | None) -> Path:
    candidates = _candidates(path, config_dir)
    for candidate in candidates:
        if candidate.exists():
            return candidate
    raise DatasetError(
        "dataset_missing",
        f"data set '{path}' is not there; looked at {', '.join(map(str, candidates))}",
        path=path,
        candidates=candidates,
    )


def _read(path: Path) -> Table:
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise DatasetError(
            "dataset_suffix",
            f"data set {path}: cannot read '{path.suffix}' files; can read {', '.join(_READERS)}",
            path=path,
            known=list(_READERS),
        )
    try:
        return reader(path)
    except (OSError, ValueError) as error:
        raise DatasetError("dataset_unreadable", f"data set {path} cannot be read: {error}", path=path) from error


def _read_jsonl(path: Path) -> Table:
    rows: Table = []
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                rows.append(_row(json.loads(text)))
            except ValueError as error:
                raise _broken_line(path, number, error) from error
    return rows


def _read_json(path: Path) -> Table:
    loaded = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(loaded, dict):  # {"data": [...]}: some tools wrap their rows in one key
        lists = [value for value in loaded.values() if isinstance(value, list)]
        loaded = lists[0] if len(lists) == 1 else loaded
    if not isinstance(loaded, list):
        raise ValueError("it must hold a list of objects")
    return [_row(item) for item in loaded]


def _read_csv(path: Path) -> Table:
    csv.field_size_limit(_LONGEST_CELL)
    rows: Table = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        try:
            for row in reader:
                if (more := row.pop(_REST, None)) is not None:
                    names = len(reader.fieldnames or ())
                    raise DatasetError(
                        "too_many_cells",
                        f"data set {path} cannot be read: line {reader.line_num}: {len(more)} cells more than the "
                        f"header's {names}; quote a text that holds a comma",
                        path=path,
                        line=reader.line_num,
                        surplus=len(more),
                        columns=names,
                    )
                rows.append(row)
        except csv.Error as error:
            raise _broken_line(path, reader.line_num + 1, error) from error
    return rows


def _read_parquet(path: Path) -> Table:
    import pyarrow.parquet  # here: slow to import, and few runs need it

    return list(pyarrow.parquet.read_table(path).to_pylist())


def _broken_line(path: Path, line: int, error: Exception) -> DatasetError:
    return DatasetError(
        "dataset_unreadable", f"data set {path} cannot be read: line {line}: {error}", path=path, line=line
    )


def _row(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"a row is an object with named fields, not {value!r:.40}")
    return value


_READERS: Mapping[str, Callable[[Path], Table]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _from_folder(folder: Path, split: str, label: str) -> Rows:
    """Loads a folder made by save_to_disk, or a folder with one file per split (train.jsonl, test.parquet)."""
    base = _base(split)
    if not ((folder / "state.json").exists() or (folder / "dataset_dict.json").exists()):
        for suffix in _READERS:
            if (folder / f"{base}{suffix}").is_file():
                return _slice(_read(folder / f"{base}{suffix}"), split, label)
        there = sorted(entry.name for entry in folder.iterdir())
        raise DatasetError(
            "split_missing",
            f"{label}: {folder} is neither a folder of save_to_disk nor does it hold {base}.jsonl, .json, .csv or "
            f".parquet; it holds {', '.join(there) or 'nothing'}",
            split=base,
            known=there,
        )
    import datasets

    try:
        loaded = datasets.load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise DatasetError("dataset_unreadable", f"{label} cannot be read: {error}", path=folder) from error
    if isinstance(loaded, datasets.DatasetDict):
        if base not in loaded:
            raise DatasetError(
                "split_missing",
                f"{label}: no split '{base}'; it has {', '.join(loaded)}",
                split=base,
                known=list(loaded),
            )
        loaded = loaded[base]
    first, end = _bounds(split, len(loaded), label)
    rows: Rows = loaded.select(range(first, end))
    return rows


def _from_verifiers(config: DatasetConfig) -> Rows:
    from gristmill_env.rewards.verifiers import environment_rows  # here: it is an extra, and slow to import

    assert config.verifiers_id is not None
    built = environment_rows(config.verifiers_id, config.dataset_args, _base(config.split))
    first, end = _bounds(config.split, len(built), f"verifiers environment '{config.verifiers_id}'")
    rows: Rows = built.select(range(first, end))
    return rows


def _from_hub(name: str, config: DatasetConfig) -> tuple[str, Rows]:
    import datasets

    part, revision = config.dataset_config, config.dataset_revision
    at = f"@{revision}" if revision else ""
    label = f"data set '{name}{at}'{f' ({part})' if part else ''} (split {config.split})"
    try:
        # From version 4, `datasets` runs no code from a data set, and has no switch for it.
        rows: Any = datasets.load_dataset(name, part, split=config.split, revision=revision)
        if revision is not None:
            _check_revision(rows, name, revision, label)
    except (OSError, ValueError, RuntimeError, httpx.HTTPError) as error:
        offline = " (offline: only the local cache was searched)" if datasets.config.HF_HUB_OFFLINE else ""
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DatasetError(
            "dataset_unavailable",
            f"{label} cannot be loaded; looked for a local path of that name and on the hub{offline}: {reason}",
            label=label,
        ) from error
    return label, rows


def _check_revision(rows: Any, name: str, revision: str, label: str) -> None:
    """Checks the revision, because `datasets` returns any cached rows if the hub is away or lacks the revision.

    Raises DatasetError when `rows` are of another revision; OSError and httpx.HTTPError when the hub does not resolve
    a branch or a tag.
    """
    import huggingface_hub

    there = Path(rows.cache_files[0]["filename"]).parent.name
    wanted = (
        revision if _COMMIT.fullmatch(revision) else huggingface_hub.HfApi().dataset_info(name, revision=revision).sha
    )
    if there != wanted:
        raise DatasetError(
            "revision_not_cached",
            f"{label} is not there; the cache holds revision {there}. Load it once with a connection to the hub, or "
            "set dataset_revision to that one",
            revision=wanted,
            cached=there,
        )


_COMMIT = re.compile(r"[0-9a-f]{40}")


def _slice(rows: Table, split: str, label: str) -> Table:
    first, end = _bounds(split, len(rows), label)
    return rows[first:end]


def _base(split: str) -> str:
    """Returns "train" for "train[:100]"."""
    return split.partition("[")[0]


_SLICE = re.compile(r"\w+(?:\[(?P<first>-?\d+%?)?:(?P<end>-?\d+%?)?\])?")


def _bounds(split: str, length: int, label: str) -> tuple[int, int]:
    """Returns the first and end row of a split such as "train[10%:]", as `datasets` reads it."""
    match = _SLICE.fullmatch(split)
    if match is None:
        raise DatasetError(
            "not_a_split", f"{label}: '{split}' is not a split; write train, train[:100], train[10%:20%]", split=split
        )

    def row(text: str | None, default: int) -> int:
        if text is None:
            return default
        number = round(int(text[:-1]) * length / 100) if text.endswith("%") else int(text)
        return max(0, min(length, number + length if number < 0 else number))

    return row(match["first"], 0), row(match["end"], length)
