"""Reads the records of an offline W&B run back from its file.

The file is a LevelDB log of W&B's own protobuf records. After a header of seven bytes follow blocks of 32 KiB that hold
chunks. Each chunk has its checksum, its length, and whether it is a whole record or which part of a record.
"""

from __future__ import annotations

import importlib
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BLOCK = 32 * 1024
_CHUNK = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


@dataclass(frozen=True)
class WandbRun:
    """An offline run."""

    folder: Path
    name: str
    group: str
    config: dict[str, Any]
    history: list[dict[str, Any]]
    """One entry per `log` call; W&B's own keys, which begin with an underscore, are left out."""

    def table(self, entry: dict[str, Any], key: str) -> list[list[Any]]:
        """Returns a table that `entry` of the history logged: its columns' names, then its rows."""
        found: dict[str, Any] = json.loads((self.folder / "files" / entry[key]["path"]).read_text())
        return [found["columns"], *found["data"]]


def read_wandb(folder: Path) -> WandbRun:
    """Returns the one offline run in `folder`/wandb, closed. Ends W&B's own process, which continues to write after a
    run's close."""
    import wandb

    messages: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")  # created at run time, so it has no types

    wandb.teardown()
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    name, group = "", ""
    config: dict[str, Any] = {}
    history: list[dict[str, Any]] = []
    for raw in _records(file.read_bytes()):
        record = messages.Record.FromString(raw)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            name, group = record.run.display_name, record.run.run_group
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "history":
            history.append(_entry(record.history.item))
    return WandbRun(file.parent, name, group, config, history)


def _entry(items: Any) -> dict[str, Any]:
    entry: dict[str, Any] = {}
    for item in items:
        *above, last = item.nested_key or [item.key]
        place = entry
        for key in above:
            place = place.setdefault(key, {})
        place[last] = json.loads(item.value_json)
    return {key: value for key, value in entry.items() if not key.startswith("_")}


def _records(data: bytes) -> Iterator[bytes]:
    assert data[:4] == b":W&B", "no W&B file"
    at, record = 7, b""
    while at < len(data):
        if _BLOCK - at % _BLOCK < _CHUNK.size:  # too little is left of the block for a chunk
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = _CHUNK.unpack_from(data, at)
        at += _CHUNK.size
        record += data[at : at + length]
        at += length
        if kind in (_FULL, _LAST):
            yield record
            record = b""
        else:
            assert kind in (_FIRST, _MIDDLE), f"chunk of kind {kind}"
