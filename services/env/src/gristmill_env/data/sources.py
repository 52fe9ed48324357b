"""Gets rows from a local file, a folder made by save_to_disk, the hub or its offline cache, or a function."""

from __future__ import annotations

import copy
import inspect
import logging
import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from gristmill.errors import GristmillError
from gristmill.internal.config_files import readable_by_all
from gristmill.internal.plugins import load_plugin
from gristmill_env.data.files import SUFFIXES, FileRows, Rows
from gristmill_env.errors import DatasetError
from gristmill_env.options import checked_options, typed_options
from gristmill_env.settings.dataset import DatasetConfig
from gristmill_env.values import message_of, private

logger = logging.getLogger(__name__)

_SHARD = re.compile(r"-(?P<number>\d{5})-of-(?P<count>\d{5})(?:-[0-9a-f]+)?")
"""The end of a shard's name in a data set of the hub: train-00000-of-00002.parquet."""
MOST_MADE = 1_000_000
"""Rows that a function may make if the split has no end. A generator may be endless."""
_SAY_EVERY = 10.0
"""Seconds between two lines of the log while a function makes rows."""


def load_rows(config: DatasetConfig, config_dir: Path | None) -> tuple[str, Rows]:
    """Returns a label of the data set and split for messages, and the rows.

    Raises DatasetError naming the data set and the places that were searched. Raises PluginError if the code of `rows`
    cannot be loaded.
    """
    name, path = config.dataset_name, config.dataset_path
    if not config.has_rows:
        raise DatasetError(
            "dataset_unset",
            "no data set: set dataset.dataset_name (hub), dataset.dataset_path (local file) or dataset.rows (Python)",
        )
    if name is not None and Path(name).suffix.lower() not in SUFFIXES and not _exists(name, config_dir):
        return _from_hub(name, config)
    if config.dataset_revision is not None:
        raise DatasetError(
            "revision_not_of_hub",
            f"dataset_revision pins a data set on the hub, which '{config.rows or path or name}' is not; leave it out",
        )
    if config.rows is not None:
        return _from_function(config.rows, config, config_dir)
    path = path or name
    assert path is not None
    label = f"data set '{path}' (split {config.split})"
    with _permission_errors(path):
        place = _find(path, config_dir)
        if place.is_file():
            return label, _slice([place], config.split, label)
        return label, _from_folder(place, config, label)


def _candidates(path: str, config_dir: Path | None) -> list[Path]:
    folders = [Path(), *([config_dir] if config_dir is not None else [])]
    return list(dict.fromkeys((folder / path).absolute() for folder in reversed(folders)))


def _exists(path: str, config_dir: Path | None) -> bool:
    with _permission_errors(path):
        return any(candidate.exists() for candidate in _candidates(path, config_dir))


def _find(path: str, config_dir: Path | None) -> Path:
    candidates = _candidates(path, config_dir)
    for candidate in candidates:
        if candidate.exists():
            return candidate
    hint = ". A pattern is not a path; name the folder of the files" if "*" in path else ""
    raise DatasetError(
        "dataset_missing",
        f"data set '{path}' is not there; looked at {', '.join(map(str, candidates))}{hint}",
        path=path,
        candidates=candidates,
    )


@contextmanager
def _permission_errors(path: str) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        denied = Path(error.filename or path)
        raise DatasetError(
            "dataset_unreadable", f"data set {denied} cannot be read: {error.strerror}{readable_by_all(denied)}",
            path=denied,
        ) from error  # fmt: skip


def _from_folder(folder: Path, config: DatasetConfig, label: str) -> Rows:
    """Loads a folder made by save_to_disk, one file per split (train.jsonl), or a copy of a hub's data set.

    A copy holds shards (train-00000-of-00001.parquet) in itself, in data/, or in the folder of a `dataset_config`.
    Raises DatasetError for a `dataset_config` without a folder, because other rows would be read without a word.
    """
    split, base, part = config.split, _base(config.split), config.dataset_config
    saved = any((folder / name).exists() for name in ("state.json", "dataset_dict.json"))
    if part is not None and (saved or not (folder / part).is_dir()):
        configs = [] if saved else sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        why = (
            "save_to_disk wrote it"
            if saved
            else f"it has the folders {', '.join(configs)}"
            if configs
            else "no folders"
        )
        raise DatasetError(
            "configuration_missing",
            f"{label}: {folder} has no configuration '{part}' ({why}); leave dataset_config out, or correct it",
            configuration=part,
            known=configs,
        )
    if not saved:
        searched = folder if part is None else folder / part
        for place in (searched, searched / "data"):
            if place.is_dir() and (files := _files_of(place, base, label)):
                return _slice(files, split, label)
        entries = sorted(entry.name for entry in searched.iterdir())
        below = [one.name for one in sorted(folder.iterdir()) if one.is_dir() and _files_of(one, base, label)]
        hint = f"; set dataset_config to {' or '.join(below)}" if below else ""
        raise DatasetError(
            "split_missing",
            f"{label}: {searched} is neither a folder of save_to_disk nor does it hold {base}.jsonl, .json, .csv or "
            f".parquet, nor shards such as {base}-00000-of-00001.parquet; it holds {', '.join(entries) or 'nothing'}"
            f"{hint}",
            split=base,
            known=entries,
            configurations=below,
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
    rows: Rows = _undecoded(loaded).select(range(first, end) if first < end else [])
    return rows


def _undecoded(rows: Any) -> Any:
    """Returns the rows of a `datasets.Dataset` as plain values, with images, sound and video as their bytes and path.

    Text needs no decoding. A damaged image, or a decoder that is not installed, would otherwise end the run. A format
    that was saved with the rows (numpy, torch, pandas) would hide columns, or give values that are not text.
    """
    rows = rows.with_format(None)
    for name, feature in list(rows.features.items()):
        plain = copy.deepcopy(feature)
        if _switch_decoding_off(plain):
            rows = rows.cast_column(name, plain)
    return rows


def _switch_decoding_off(feature: Any) -> bool:
    """Changes a feature and the features inside it. Returns whether any of them decodes."""
    inner = feature.values() if isinstance(feature, Mapping) else feature if isinstance(feature, list | tuple) else ()
    found = [_switch_decoding_off(one) for one in (*inner, getattr(feature, "feature", None)) if one is not None]
    if isinstance(getattr(feature, "decode", None), bool):
        feature.decode = False
        return True
    return any(found)


def _files_of(folder: Path, base: str, label: str) -> Sequence[Path]:
    """Returns the file of a split in a folder, or its shards in order. Raises DatasetError if shards are missing."""
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES and file.is_file())
    for suffix in SUFFIXES:
        for file in files:
            if (file.stem, file.suffix.lower()) == (base, suffix):
                return [file]
    shards = [file for file in files if file.name.startswith(base) and _SHARD.fullmatch(file.stem.removeprefix(base))]
    if not shards:
        return []
    counts = [_SHARD.fullmatch(file.stem.removeprefix(base)) for file in shards]
    of = {int(match["count"]) for match in counts if match is not None}
    if of != {len(shards)}:
        remedy = "copy all of them" if len(of) == 1 else "they are of several downloads: remove those of the older ones"
        raise DatasetError(
            "shards_missing",
            f"{label}: {folder} holds {len(shards)} shards of '{base}' out of {max(of)}; {remedy}",
            path=folder,
            count=len(shards),
            of=max(of),
        )
    return shards


def _from_hub(name: str, config: DatasetConfig) -> tuple[str, Rows]:
    import datasets  # here and in `_permute` of dataset.py, because processes of environments import these modules
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of httpx or httpx2, by the version

    part, revision = config.dataset_config, config.dataset_revision
    at = f"@{revision}" if revision else ""
    label = f"data set '{name}{at}'{f' ({part})' if part else ''} (split {config.split})"
    try:
        # From version 4, `datasets` runs no code from a data set, and has no switch for it.
        rows: Any = datasets.load_dataset(name, part, split=config.split, revision=revision)
        if revision is not None:
            _check_revision(rows, name, revision, label)
    except (OSError, ValueError, RuntimeError, ImportError, HTTPError, datasets.exceptions.DatasetsError) as error:
        offline = " (offline: only the local cache was searched)" if datasets.config.HF_HUB_OFFLINE else ""
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DatasetError(
            "dataset_unavailable",
            f"{label} cannot be loaded; looked for a local path of that name and on the hub{offline}: {reason}",
            label=label,
        ) from error
    return label, _undecoded(rows)


def _own(value: Any) -> Any:
    """Returns a value of a row as plain values of our own: the function may change its lists and dicts later."""
    if isinstance(value, Mapping):
        return {name: _own(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_own(inner) for inner in value]
    return value.tolist() if hasattr(value, "tolist") else private(value)


def _from_function(place: str, config: DatasetConfig, folder: Path | None) -> tuple[str, Rows]:
    """Makes the rows of a split by a user's function, which gets the split's name if it has a parameter `split`."""
    label = f"data set '{place}' (split {config.split})"
    end = _counted_end(config.split, label)
    function = load_plugin(place, folder)
    if not callable(function):
        raise DatasetError("rows_not_a_function", f"{label} is {function!r:.60}; it must be a function", label=label)
    arguments = _arguments(function, config, label)
    rows: list[dict[str, Any]] = []
    columns: dict[str, None] = {}
    said = time.monotonic()
    try:
        for row in islice(function(**arguments), MOST_MADE + 1 if end is None else end):
            if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
                text = f"row {len(rows)} of {label} is {row!r:.60}; a row is a dict with names of columns"
                raise DatasetError("not_a_row", text, label=label, row=len(rows))
            rows.append({name: _own(value) for name, value in row.items()})
            columns |= dict.fromkeys(row)
            if time.monotonic() - said > _SAY_EVERY:
                said = time.monotonic()
                logger.info("%s: %d rows so far", label, len(rows))
    except GristmillError:  # also of an adapter that ships, whose package is missing for example
        raise
    except (Exception, SystemExit) as error:  # the user's code
        frames = traceback.extract_tb(error.__traceback__)[1:]
        at = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        text = f"{label} failed after {len(rows)} rows: {type(error).__name__}: {message_of(error)}{at}"
        raise DatasetError("rows_failed", text, label=label, row=len(rows), error=type(error).__name__) from error
    if end is None and len(rows) > MOST_MADE:
        text = f"{label} has more than {MOST_MADE:,} rows, or no end; set how many to take, such as split: train[:1000]"
        raise DatasetError("rows_without_end", text, label=label, most=MOST_MADE)
    first, last = _bounds(config.split, len(rows), label)
    missing = dict.fromkeys(columns)
    return label, [row if len(row) == len(missing) else {**missing, **row} for row in rows[first:last]]


def _arguments(function: Callable[..., Iterable[Any]], config: DatasetConfig, label: str) -> dict[str, Any]:
    """Returns the arguments of a function of rows. Raises DatasetError for params that it does not take."""
    taken = [
        one if one.name in config.rows_params else one.replace(annotation=one.empty)
        for one in inspect.signature(function).parameters.values()
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    ]
    options = typed_options(function, taken, label, DatasetError, label=label)
    given = {**({"split": _base(config.split)} if "split" in options else {}), **config.rows_params}
    return checked_options(given, options, label, DatasetError, under="rows_params", label=label)


def _check_revision(rows: Any, name: str, revision: str, label: str) -> None:
    """Checks the revision, because `datasets` returns any cached rows if the hub is away or lacks the revision.

    Raises DatasetError when `rows` are of another revision; OSError and httpx.HTTPError when the hub does not resolve
    a branch or a tag.
    """
    import huggingface_hub

    cached = Path(rows.cache_files[0]["filename"]).parent.name
    wanted = (
        revision if _COMMIT.fullmatch(revision) else huggingface_hub.HfApi().dataset_info(name, revision=revision).sha
    )
    if cached != wanted:
        raise DatasetError(
            "revision_not_cached",
            f"{label} is not there; the cache holds revision {cached}. Load it once with a connection to the hub, or "
            "set dataset_revision to that one",
            revision=wanted,
            cached=cached,
        )


_COMMIT = re.compile(r"[0-9a-f]{40}")


def _slice(files: Sequence[Path], split: str, label: str) -> Rows:
    """Returns the rows of a split. Reads no row after its last, if the split counts rows from the first."""
    rows = FileRows(files, _counted_end(split, label))
    rows.cut(*_bounds(split, len(rows), label))
    return rows


def _counted_end(split: str, label: str) -> int | None:
    """Returns the end of a split that counts rows from the first; None if its rows depend on the number of all rows."""
    match = _match(split, label)
    counted = all(text is None or text.isdecimal() for text in match.groups()) and match["end"] is not None
    return int(match["end"]) if counted else None


def _base(split: str) -> str:
    """Returns "train" for "train[:100]"."""
    return split.partition("[")[0]


_SLICE = re.compile(r"\w+(?:\[(?P<first>-?\d+%?)?:(?P<end>-?\d+%?)?\])?")


def _bounds(split: str, length: int, label: str) -> tuple[int, int]:
    """Returns the first and end row of a split such as "train[10%:]", as `datasets` reads it."""
    match = _match(split, label)

    def row(text: str | None, default: int) -> int:
        if text is None:
            return default
        number = round(int(text[:-1]) * length / 100) if text.endswith("%") else int(text)
        return max(0, min(length, number + length if number < 0 else number))

    return row(match["first"], 0), row(match["end"], length)


def _match(split: str, label: str) -> re.Match[str]:
    if (match := _SLICE.fullmatch(split)) is None:
        raise DatasetError(
            "not_a_split", f"{label}: '{split}' is not a split; write train, train[:100], train[10%:20%]", split=split
        )
    return match
