"""Segments: groups are read as written, a torn end is cut, the cap is kept, damage is reported."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.errors import raises
from tests.support.groups import make_group

from gristmill import ArchiveError, read_archive, read_rollouts
from gristmill.archive import segment, segments
from gristmill.internal.archive_writer import RunWriter

pytestmark = pytest.mark.slow

MIB = 1 << 20


def write(run: Path, ids: list[str], *, run_id: str = "test", created_ms: int = 1, max_bytes: int = 1 << 30) -> None:
    writer = RunWriter(run / "rollouts", run_id, created_ms, max_bytes)
    for group_id in ids:
        writer.append(group_id, "group", body(group_id))
    writer.sync()
    writer.close()


def body(group_id: str) -> bytes:
    return make_group(group_id, seed=int(group_id[1:])).encode()


def ids(run: Path) -> list[str]:
    return [group.group_id for group in read_archive(run)]


def names(count: int, start: int = 0) -> list[str]:
    return [f"g{number:08}" for number in range(start, start + count)]


def test_archive_reads_groups_as_they_were_submitted(tmp_path: Path) -> None:
    write(tmp_path, names(5))
    for group, name in zip(read_rollouts(tmp_path), names(5), strict=True):
        assert group.encode() == body(name)
    assert ids(tmp_path / "rollouts") == names(5), "the folder itself is as good"


def test_groups_of_each_protocol_are_kept_and_read(tmp_path: Path) -> None:
    plain = body("g00000001")
    writer = RunWriter(tmp_path / "rollouts", "test", 1, MIB)
    writer.append("g1", "group", plain)
    writer.append("g2", "atropos", b'{"tokens": [[1]]}')
    writer.close()
    assert [group.body for group in read_archive(tmp_path)] == [plain, b'{"tokens": [[1]]}']
    with raises(ArchiveError, "archive_schema", schema="atropos"):
        list(read_rollouts(tmp_path))


def test_any_zstd_reads_a_segment(tmp_path: Path) -> None:
    """Frames after frames: zstd's own decoder gives plain msgpack."""
    write(tmp_path, names(3))
    raw = segments(tmp_path)[0].read_bytes()
    plain = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True).read()
    found = []
    while plain:
        # An array of three: the header says how many bytes to read.
        for size in range(len(plain), 0, -1):
            try:
                found.append(msgspec.msgpack.decode(plain[:size], type=tuple[str, str, bytes]))
            except msgspec.DecodeError:
                continue
            plain = plain[size:]
            break
    assert found == [(name, "group", body(name)) for name in names(3)]


@settings(max_examples=60, deadline=None)  # each waits for the disk
@given(data=st.data())
def test_torn_end_of_a_segment_is_not_read_and_is_cut_by_the_next_write(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    run = tmp_path_factory.mktemp("run")
    count = data.draw(st.integers(1, 4))
    write(run, names(count))
    path = segments(run)[0]
    whole = path.read_bytes()
    ends = _ends(run, count)
    kept = data.draw(st.integers(0, len(whole) - 1))
    zeros = data.draw(st.integers(0, 100))
    path.write_bytes(whole[:kept] + bytes(zeros))
    expected = names(sum(end <= kept for end in ends))
    assert ids(run) == expected
    write(run, names(2, start=10))
    assert ids(run) == expected + names(2, start=10)


def _ends(run: Path, count: int) -> list[int]:
    with segments(run)[0].open("rb") as file:
        segment.read_opening(file, "")
        ends = [end for _, _, end in segment.read_frames(file, "")]
    assert len(ends) == count
    return ends


@pytest.mark.parametrize("at", ["mark", "length", "body", "opening"])
def test_damage_before_the_end_is_reported_and_never_cut(tmp_path: Path, at: str) -> None:
    write(tmp_path, names(3))
    path = segments(tmp_path)[0]
    mark = _ends(tmp_path, 3)[0]
    offset = {"opening": 0, "mark": mark, "length": mark + 12, "body": mark + 90}[at]
    damaged = bytearray(path.read_bytes())
    damaged[offset] ^= 0xFF
    path.write_bytes(damaged)
    with raises(ArchiveError, "not_an_archive_segment" if at == "opening" else "archive_damaged") as raised:
        ids(tmp_path)
    assert path.name in str(raised.value)
    write(tmp_path, names(1, start=7))
    assert path.read_bytes() == damaged
    assert [file.name for file in segments(tmp_path)] == ["000001.gmz", "000002.gmz"]
    path.rename(tmp_path / "aside")
    assert ids(tmp_path) == names(1, start=7)


def test_group_written_twice_is_read_once(tmp_path: Path) -> None:
    write(tmp_path, names(3))
    write(tmp_path, names(4, start=1))
    assert ids(tmp_path) == names(5)


def test_recreated_run_gets_its_own_segment(tmp_path: Path) -> None:
    write(tmp_path, names(2), created_ms=1)
    write(tmp_path, names(3), created_ms=2)
    assert len(segments(tmp_path)) == 2
    assert ids(tmp_path) == names(2) + names(3)


def test_newest_run_is_the_last_one_also_if_the_clock_was_set_back(tmp_path: Path) -> None:
    write(tmp_path, names(2), created_ms=2)
    write(tmp_path, names(3), created_ms=1)
    assert [group.group_id for group in read_archive(tmp_path, newest_only=True)] == names(3)


def test_oldest_segments_are_removed_first(tmp_path: Path) -> None:
    cap = 64_000
    for start in range(0, 400, 50):
        write(tmp_path, names(50, start=start), max_bytes=cap)
        assert sum(path.stat().st_size for path in segments(tmp_path)) <= cap
    assert len(segments(tmp_path)) > 3
    left = ids(tmp_path)
    assert left == names(400)[-len(left) :]
    assert len(left) > 40


def test_current_segment_is_kept_even_above_the_cap(tmp_path: Path) -> None:
    write(tmp_path, names(3), max_bytes=10)
    assert ids(tmp_path) == names(3)[-1:]


def test_interrupted_write_keeps_the_complete_groups(tmp_path: Path) -> None:
    """Files may not exceed 256 KiB, as if the disk were full: the kernel writes a part of a group and then refuses."""
    done = subprocess.run([sys.executable, "-c", _FULL, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(ids(tmp_path)) == int(done.stdout)
    whole = segments(tmp_path)[0].stat().st_size
    assert whole < 256 << 10
    write(tmp_path, names(1))
    assert ids(tmp_path)[-1] == "g00000000"
    assert segments(tmp_path)[0].stat().st_size > whole, "it continues in the same segment"


_FULL = """
import os, resource, sys
from pathlib import Path
from gristmill.internal.archive_writer import RunWriter

resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 10, 256 << 10))
written = 0
for attempt in range(3):
    writer = RunWriter(Path(sys.argv[1]) / "rollouts", "test", 1, 1 << 30)
    try:
        while True:
            writer.append(f"g{written:07}x", "group", os.urandom(5000))
            written += 1
    except OSError as error:
        writer.close()
print(written)
"""


def test_reading_holds_one_group_at_a_time(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "rollouts", "test", 1, 1 << 40)
    rng = np.random.default_rng(0)
    for number in range(60):
        writer.append(f"g{number:08}", "group", rng.bytes(MIB))
    writer.close()
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_archive(tmp_path)) == 60
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    finally:
        tracemalloc.stop()


def test_folder_without_rollouts_is_an_error(tmp_path: Path) -> None:
    with raises(ArchiveError, "no_archive", folder=tmp_path):
        list(read_rollouts(tmp_path))


def test_segment_removed_while_it_is_read_is_skipped(tmp_path: Path) -> None:
    write(tmp_path, names(1), created_ms=1)
    write(tmp_path, names(1, start=1), created_ms=2)
    write(tmp_path, names(1, start=2), created_ms=3)
    reading = read_archive(tmp_path)
    assert next(reading).group_id == "g00000000"
    segments(tmp_path)[1].unlink()
    assert [group.group_id for group in reading] == ["g00000002"]


def test_newer_archive_format_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, names(1))
    path = segments(tmp_path)[0]
    before = segment.opening("test", 1)
    content = before[12:].replace(b"\xa6format\x01", b"\xa6format\x02")
    after = before[:8] + zlib.crc32(content).to_bytes(4, "little") + content
    path.write_bytes(path.read_bytes().replace(before, after))
    with raises(ArchiveError, "archive_format", format=2):
        ids(tmp_path)


def test_writer_that_continues_a_segment_holds_its_groups(tmp_path: Path) -> None:
    write(tmp_path, names(5))
    path = segments(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:-1])  # The last group is torn.
    writer = RunWriter(tmp_path / "rollouts", "test", 1, MIB)
    assert [writer.holds(name) for name in names(6)] == [True] * 4 + [False] * 2
    writer.close()
    later = RunWriter(tmp_path / "rollouts", "test", 2, MIB)
    assert not any(later.holds(name) for name in names(5)), "a later run of the same id has other groups"


@pytest.mark.parametrize("failing", range(3))
@pytest.mark.parametrize("disk", ["keeps modes", "is read-only meanwhile", "keeps no modes"])
def test_groups_of_a_segment_whose_fsync_failed_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int, disk: str
) -> None:
    """The kernel reports a failed fsync once: the next one succeeds although the data are not on disk."""
    write(tmp_path, names(2))
    if disk != "keeps modes":
        refused = OSError(errno.EROFS, "Read-only file system") if disk == "is read-only meanwhile" else None
        monkeypatch.setattr(os, "fchmod", Mock(side_effect=refused))
    inodes: list[int] = []
    fsync = os.fsync

    def fails_once(handle: int) -> None:
        inodes.append(os.fstat(handle).st_ino)
        if len(inodes) == failing + 1:
            raise OSError(errno.EIO, "Input/output error")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", fails_once)
    for attempt in range(3):
        try:
            # The second creation begins a new segment, so the fsyncs are of the segment, its folder, and the groups.
            writer = RunWriter(tmp_path / "rollouts", "test", 2, 1 << 30)
            for group_id in names(3, start=5):
                if not writer.holds(group_id):
                    writer.append(group_id, "group", body(group_id))
            writer.sync()
            writer.close()
        except OSError:
            assert attempt == 0
    assert attempt == 2
    trusted = [path for path in segments(tmp_path) if path.stat().st_ino != inodes[failing]]
    if inodes[failing] == (tmp_path / "rollouts").stat().st_ino:
        del trusted[1]  # The segment whose name is not on disk.
    held = [found.group_id for path in trusted for found in _groups_of(path)]
    assert held == names(2) + names(3, start=5), "each group is in a segment whose fsync succeeded, and once"
    assert ids(tmp_path) == names(2) + names(3, start=5)


def _groups_of(path: Path) -> Iterator[segment.ArchivedGroup]:
    with path.open("rb") as file:
        assert segment.read_opening(file, str(path)) is not None
        for frames, head_size, _ in segment.read_frames(file, str(path)):
            yield segment.parse(frames, head_size)


def test_writer_holds_the_groups_before_a_segment_whose_opening_is_torn(tmp_path: Path) -> None:
    write(tmp_path, names(5))
    (tmp_path / "rollouts" / "000002.gmz").write_bytes(b"\x50")
    writer = RunWriter(tmp_path / "rollouts", "test", 1, MIB)
    assert all(writer.holds(name) for name in names(5))
    writer.close()
