"""drops.jsonl: lines are whole, the file is bounded, and a group of a removed segment is listed before it is gone."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from gristmill import read_archive
from gristmill.archive.drops import Drop, append_drops, read_drops
from gristmill.internal.archive_writer import RunWriter


def drop(number: int) -> Drop:
    return Drop(creation=1, group_id=f"g{number:08d}", row=number, what="dropped", reason="stale", time_ms=number)


def read(run: Path, name: str = "drops.jsonl") -> list[int]:
    return [found.row for found, _ in read_drops(run / name)]


def test_lines_are_read_as_written_and_from_any_offset(tmp_path: Path) -> None:
    append_drops(tmp_path, map(drop, range(3)))
    found = list(read_drops(tmp_path / "drops.jsonl"))
    assert [one for one, _ in found] == [drop(number) for number in range(3)]
    assert [one.row for one, _ in read_drops(tmp_path / "drops.jsonl", found[0][1])] == [1, 2]
    assert found[-1][1] == (tmp_path / "drops.jsonl").stat().st_size


@pytest.mark.parametrize("torn", [b'{"creation":1,"gro', b"\0" * 70_000])
def test_torn_line_is_not_read_and_is_removed_by_the_next_write(tmp_path: Path, torn: bytes) -> None:
    append_drops(tmp_path, [drop(0)])
    with (tmp_path / "drops.jsonl").open("ab") as file:
        file.write(torn)
    assert read(tmp_path) == [0]
    append_drops(tmp_path, [drop(1)])
    assert read(tmp_path) == [0, 1]


class Disk:
    """Records the files and folders that fsync flushes, and fails at the given names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *failing: str) -> None:
        self.synced: list[str] = []
        self._failing = list(failing)
        self._fsync = os.fsync
        monkeypatch.setattr("os.fsync", self)

    def __call__(self, handle: int) -> None:
        name = Path(f"/proc/self/fd/{handle}").readlink().name
        if self._failing and name == self._failing[0]:
            raise OSError(errno.EIO, f"fsync of {self._failing.pop(0)}")
        self._fsync(handle)
        self.synced.append(name)


@pytest.mark.parametrize("failing", ["drops.jsonl", "run", "above"])
def test_lines_whose_fsync_failed_are_written_again_to_a_file_whose_name_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    run = tmp_path / "above" / "run"
    run.parent.mkdir()
    disk = Disk(monkeypatch, failing)
    with pytest.raises(OSError, match=failing):
        append_drops(run, [drop(0)])
    if failing == "drops.jsonl":
        assert not (run / "drops.jsonl").exists()
    append_drops(run, [drop(0)])
    assert {*read(run)} == {0}
    assert {"above", "run", "drops.jsonl"} <= {*disk.synced}
    assert disk.synced[-2:] == ["drops.jsonl", "run"]


def test_failed_fsync_leaves_the_earlier_lines_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append_drops(tmp_path, [drop(0)])
    Disk(monkeypatch, "drops.jsonl")
    with pytest.raises(OSError, match="fsync"):
        append_drops(tmp_path, [drop(1)])
    assert read(tmp_path) == [0]
    append_drops(tmp_path, [drop(1)])
    assert read(tmp_path) == [0, 1]


def test_full_file_is_kept_once_under_another_name(tmp_path: Path) -> None:
    for number in range(100):
        append_drops(tmp_path, [drop(number)], max_bytes=2000)
    newer, older = read(tmp_path), read(tmp_path, "drops.1.jsonl")
    assert [*older, *newer] == list(range(100 - len(older) - len(newer), 100))
    assert all((tmp_path / name).stat().st_size <= 2000 for name in ("drops.jsonl", "drops.1.jsonl"))
    assert {path.name for path in tmp_path.iterdir()} == {"drops.jsonl", "drops.1.jsonl"}


def test_groups_of_a_removed_segment_are_reported_while_they_are_still_on_disk(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    reported: list[str] = []

    def removed(ids: Sequence[str], bound: str) -> None:
        assert bound == "max_bytes"
        assert {*ids} <= {group.group_id for group in read_archive(folder)}
        reported.extend(ids)

    writer = RunWriter(folder, "test", 1, 4000, on_removed=removed)
    written = [f"g{number:08d}" for number in range(60)]
    for group_id in written:
        writer.append(group_id, "group", bytes(range(100)))
    writer.sync()
    left = [group.group_id for group in read_archive(folder)]
    assert reported
    assert reported + left == written


@pytest.mark.slow
def test_groups_are_reported_after_their_removal_if_the_disk_has_no_room_before(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    reported: list[str] = []

    def removed(ids: Sequence[str], bound: str) -> None:
        if {*ids} <= {group.group_id for group in read_archive(folder)}:
            raise OSError("no space left on device")
        reported.extend(ids)

    writer = RunWriter(folder, "test", 1, 4000, on_removed=removed)
    written = [f"g{number:08d}" for number in range(60)]
    for group_id in written:
        writer.append(group_id, "group", bytes(range(100)))
    assert reported == written[: len(reported)]
    assert reported
