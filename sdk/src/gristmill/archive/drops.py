"""Groups that are not in a run's archive, and why: `<run>/drops.jsonl`, one JSON object per line.

The trajectory API's archiver appends a line when a group is dropped, becomes a dead letter or is replayed, and when the
archive lets a trained group go. A crash may write a line twice. Beyond `MAX_BYTES` the file becomes `drops.1.jsonl`,
which replaces an older file of this name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from gristmill.internal import foreign
from gristmill.internal.disk import make_folder, sync
from gristmill.internal.lines import LineFile, decoded, whole_lines

DROPS_FILE, OLDER_DROPS_FILE = "drops.jsonl", "drops.1.jsonl"
MAX_BYTES = 64 << 20
"""Largest size of each of the two files, about half a million lines."""


class Drop(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fate of one group. Of several lines about a group, the last one counts."""

    creation: int
    """Time of the run's creation, ms. Group ids start again when a run is deleted and created again."""
    group_id: str
    row: int
    """The data set row number; -1 for groups of Atropos' protocol, which have no rows."""
    what: Literal["dropped", "dead", "replayed", "let_go"]
    """dropped: not trained on. dead: a dead letter. replayed: a dead letter that is ready again. let_go: trained on,
    and not or no longer in the archive."""
    reason: str | None = None
    """Such as "same_scores" or "stale"; of a group that was let go: "disk", "max_bytes" or "archive_lost"."""
    env_id: str | None = None
    step: int | None = None
    """Step of the oldest weights that sampled the group; None if the group was dropped before its submit."""
    sequences: int | None = None
    time_ms: int
    """When it happened, ms of Unix time."""


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Drop)


def append_drops(run: Path, drops: Iterable[Drop], max_bytes: int = MAX_BYTES) -> None:
    """Appends to the file of the run's folder. The lines are on disk when this returns. Raises OSError, and then the
    file has none of them."""
    lines = [_ENCODER.encode(drop) for drop in drops]
    make_folder(run)
    path = run / DROPS_FILE
    if path.exists() and path.stat().st_size + sum(map(len, lines)) > max_bytes:
        path.replace(run / OLDER_DROPS_FILE)
    is_new = not path.exists()
    try:
        with LineFile(path) as file:
            file.append(*lines)
    except OSError:
        if is_new:
            path.unlink(missing_ok=True)
        raise
    sync(run)  # The name of the file, also after an earlier call that failed here.


def read_drops(path: Path, start: int = 0, end: int | None = None) -> Iterator[tuple[Drop, int]]:
    """Yields (drop, offset after its line) from byte `start`. Leaves out a torn last line and unknown lines.

    `end`: lines that begin here or later are left out.
    """
    try:
        opened = foreign.open_file(path)
    except FileNotFoundError:
        return
    with opened as file:
        for begin, line in whole_lines(file, start):
            if end is not None and begin >= end:
                return
            if (drop := decoded(_DECODER, line)) is not None:
                yield drop, begin + len(line)
