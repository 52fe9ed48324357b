"""The format of an archive's segments: `<run>/rollouts/000001.gmz`, `000002.gmz`, ...

A segment is a sequence of zstd frames, so any zstd reads it. `zstd -dc < 000001.gmz` prints only msgpack arrays
`[group id, schema, bytes]`, one after another.

    opening      skippable frame 0x184D2A50 (zstd passes over it): little-endian u32 CRC-32 of the msgpack bytes, then
                 msgpack {format, run_id, created_ms}
    then, for each group:
    mark         skippable frame 0x184D2A51 with three little-endian u32: bytes of the head, bytes of head and body,
                 CRC-32 of head and body
    head         zstd frame: the msgpack array's start: 93, str group id, str schema, C6 and the u32 length
    body         zstd frame: the group's bytes

`created_ms` is the time at which the run was created. A run that was deleted and created again under the same id counts
as another run and starts a new segment. The schema is "group", which is `GROUP_MEDIA_TYPE`, and "trained-group" in the
trainer's own segments. Archives of an earlier API may have the JSON of Atropos' clients ("atropos").

A crash may leave a torn end: zeros, or a last group that is cut short or has a wrong checksum. A crash may also leave a
segment without a complete opening and without groups. The API acknowledged none of these bytes, so readers leave them
out. Damage anywhere else raises an ArchiveError.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from gristmill.errors import GristmillError
from gristmill.internal import compression, foreign

SUFFIX = ".gmz"
_OPENING = struct.Struct("<III")
_MARK = struct.Struct("<IIIII")
_OPENING_MAGIC, _MARK_MAGIC = 0x184D2A50, 0x184D2A51
_MAX_OPENING = _MAX_HEAD = 4096
_LENGTH = struct.Struct(">BI")
_HEAD = msgspec.msgpack.Decoder(tuple[str, str, bytes])


class ArchiveError(GristmillError):
    """A file is not a segment, or a segment is damaged before its end."""


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """The run that a segment belongs to."""

    format: int = 1
    run_id: str
    created_ms: int
    """Time of the run's creation by Redis' clock, in ms."""


@dataclass(frozen=True)
class ArchivedGroup:
    """A group with its body as it was stored."""

    group_id: str
    schema: str
    """ "group": TrajectoryGroup.decode reads `body`."""
    body: bytes


def files(folder: Path) -> list[Path]:
    """Returns the segments in `folder`, oldest first."""
    paths = [path for path in foreign.entries(folder.resolve()) if path.suffix == SUFFIX and foreign.is_file(path)]
    paths = [path for path in paths if path.stem.isdecimal() and path.stem.isascii()]
    return sorted(paths, key=lambda path: int(path.stem))


def opening(run_id: str, created_ms: int) -> bytes:
    """Returns the first bytes of a segment."""
    content = msgspec.msgpack.encode(Opening(run_id=run_id, created_ms=created_ms))
    return _OPENING.pack(_OPENING_MAGIC, 4 + len(content), zlib.crc32(content)) + content


def record(group_id: str, schema: str, stored: bytes) -> bytes:
    """Returns the segment's bytes for one group. `stored`: the group's bytes."""
    body = compression.deflate(stored)
    start = msgspec.msgpack.encode(group_id) + msgspec.msgpack.encode(schema)
    head = compression.deflate(b"\x93" + start + _LENGTH.pack(0xC6, len(stored)))
    checksum = zlib.crc32(body, zlib.crc32(head))
    return _MARK.pack(_MARK_MAGIC, 12, len(head), len(head) + len(body), checksum) + head + body


def parse(frames: bytes, head_size: int) -> ArchivedGroup:
    """Returns the group in `frames`, which is the head followed by the body. Raises ArchiveError."""
    try:
        head = compression.inflate(frames[:head_size], _MAX_HEAD)
        group_id, schema, _ = _HEAD.decode(head[: -_LENGTH.size] + b"\xc4\0")
        marker, size = _LENGTH.unpack(head[-_LENGTH.size :])
        body = compression.inflate(frames[head_size:], size)
    except (GristmillError, ValueError, struct.error) as error:
        raise ArchiveError("not_an_archived_group", f"not an archived group: {error}") from error
    if marker != 0xC6 or len(body) != size:
        raise ArchiveError(
            "not_an_archived_group",
            f"not an archived group: {group_id!r} has {len(body)} bytes, but its head says {size}",
        )
    return ArchivedGroup(group_id, schema, body)


def parse_id(frames: bytes, head_size: int) -> str:
    """Returns the id of the group in `frames` without its body, which may be large. Raises ArchiveError."""
    try:
        head = compression.inflate(frames[:head_size], _MAX_HEAD)
        return _HEAD.decode(head[: -_LENGTH.size] + b"\xc4\0")[0]
    except (GristmillError, ValueError) as error:
        raise ArchiveError("not_an_archived_group", f"not an archived group: {error}") from error


def read_opening(file: BinaryIO, name: str) -> Opening | None:
    """Returns the opening of a segment, or None if a crash tore the opening. Raises ArchiveError."""
    magic, length, checksum = _OPENING.unpack(file.read(_OPENING.size).ljust(_OPENING.size, b"\0"))
    content = file.read(length - 4) if 4 < length <= _MAX_OPENING else b""
    if magic != _OPENING_MAGIC or not content or zlib.crc32(content) != checksum:
        if _holds_no_mark(file):
            return None
        raise ArchiveError(
            "not_an_archive_segment", f"{name} is not an archive segment, or is damaged at its beginning. {_REMEDY}"
        )
    try:
        opening = msgspec.msgpack.decode(content, type=Opening)
    except ValueError as error:
        raise ArchiveError("not_an_archive_segment", f"{name} is not an archive segment: {error}") from error
    if opening.format != 1:
        raise ArchiveError(
            "archive_format",
            f"{name} has archive format {opening.format}; this gristmill reads format 1",
            format=opening.format,
        )
    return opening


def read_frames(file: BinaryIO, name: str) -> Iterator[tuple[bytes, int, int]]:
    """Yields (head and body, size of the head, offset of the group's end) for each whole group after the opening.

    Stops at a torn end. Raises ArchiveError if the damage is before the end.
    """
    start = file.tell()
    while len(mark := file.read(_MARK.size)) == _MARK.size:
        magic, length, head_size, size, checksum = _MARK.unpack(mark)
        if magic != _MARK_MAGIC or length != 12:
            if not _anything_left(file):
                return
            raise ArchiveError(
                "archive_damaged", f"{name} is damaged at byte {start}: no group begins there. {_REMEDY}", byte=start
            )
        if size > os.fstat(file.fileno()).st_size - file.tell():
            if _MARK.pack(_MARK_MAGIC, 12, 0, 0, 0)[:8] not in file.read():
                return  # A torn group was written last: no mark follows.
            raise ArchiveError(
                "archive_damaged", f"{name} is damaged at byte {start}: a length is wrong. {_REMEDY}", byte=start
            )
        frames = file.read(size)
        if not 0 < head_size < size or zlib.crc32(frames) != checksum:
            if not _anything_left(file):
                return
            raise ArchiveError(
                "archive_damaged",
                f"{name} is damaged at byte {start}: the group's checksum is wrong. {_REMEDY}",
                byte=start,
            )
        start = file.tell()
        yield frames, head_size, start


def read_segment(path: Path, created_ms: int | None = None) -> Iterator[tuple[Opening, bytes, int, int]]:
    """Yields (opening, head and body, size of the head, offset of the group's end) for each whole group of a file.

    `created_ms`: the creation of the run that counts; None for all. Yields nothing for a file that was removed: the API
    removes the oldest segments. Raises ArchiveError if the damage is before the end.
    """
    try:
        file = foreign.open_file(path)
    except FileNotFoundError:
        return
    with file:
        opening = read_opening(file, str(path))
        if opening is not None and created_ms in (None, opening.created_ms):
            for frames, head_size, end in read_frames(file, str(path)):
                yield opening, frames, head_size, end


def read_ids(file: BinaryIO) -> Iterator[str]:
    """Yields the group ids after the opening, without reading the groups. Stops at the first damage."""
    size = os.fstat(file.fileno()).st_size
    while len(mark := file.read(_MARK.size)) == _MARK.size:
        magic, _, head_size, length, _ = _MARK.unpack(mark)
        if magic != _MARK_MAGIC or not 0 < head_size < length or file.tell() + length > size:
            return
        try:
            head = compression.inflate(file.read(head_size), _MAX_HEAD)
            group_id, _, _ = _HEAD.decode(head[: -_LENGTH.size] + b"\xc4\0")
        except (GristmillError, ValueError):
            return
        yield group_id
        file.seek(length - head_size, os.SEEK_CUR)


_REMEDY = "Move the file elsewhere to read the segments after it."


def _holds_no_mark(file: BinaryIO) -> bool:
    """Returns whether the file is short and has no group's mark in it.

    The API writes the opening to disk before the first group, so a segment with a torn opening holds no groups.
    """
    file.seek(0)
    start = file.read(_MAX_OPENING + _MARK.size)
    return len(start) < _MAX_OPENING and _MARK_MAGIC.to_bytes(4, "little") not in start


def _anything_left(file: BinaryIO) -> bool:
    while chunk := file.read(1 << 20):
        if any(chunk):
            return True
    return False
