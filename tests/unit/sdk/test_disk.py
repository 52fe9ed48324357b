"""Files that survive a kill: complete or absent, and lines that are never torn by another writer."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from gristmill.internal.disk import complete_file, write_file
from gristmill.internal.lines import LineFile, read_lines


def test_a_complete_file_replaces_the_old_file_only_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_file(path, b"old")
    with complete_file(path) as temporary:
        temporary.write_bytes(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_complete_file_keeps_the_old_file_after_an_error(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_file(path, b"old")

    def fail() -> None:
        with complete_file(path) as temporary:
            temporary.write_bytes(b"half")
            raise ValueError

    with pytest.raises(ValueError):
        fail()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_complete_file_ignores_the_temporary_file_of_a_killed_process(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    with complete_file(path) as temporary:
        temporary.write_bytes(b"left by a kill" * 9)
        left = temporary.read_bytes()
        place = temporary
    place.write_bytes(left)
    write_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_one_exclusive_line_file_is_open_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    first = LineFile(path, exclusive=True)
    first.append(b"{}")
    with pytest.raises(BlockingIOError):
        LineFile(path, exclusive=True)
    first.append(b"[]")  # the lock survives the refused process
    with pytest.raises(BlockingIOError):
        LineFile(path, exclusive=True)
    first.close()
    LineFile(path, exclusive=True).close()
    with path.open("rb") as file:
        assert list(read_lines(file)) == [(1, b"{}\n"), (2, b"[]\n")]


def test_a_complete_last_line_gets_its_newline_and_a_torn_one_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    for end, kept in ((b'{"a": 1}', [b'{"a": 1}\n']), (b'{"a": ', [])):
        path.write_bytes(b"{}\n\n" + end)
        file = LineFile(path, exclusive=True)
        file.append(b"[]")
        file.close()
        with path.open("rb") as lines:
            assert [line for _, line in read_lines(lines)] == [b"{}\n", *kept, b"[]\n"]


def test_line_whose_fsync_failed_is_not_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reports a failed fsync once. A line that stays would be written again by the caller."""
    path = tmp_path / "samples.jsonl"
    with LineFile(path) as file:
        file.append(b"{}")
        with monkeypatch.context() as patch:
            patch.setattr("os.fsync", Mock(side_effect=OSError(5, "Input/output error")))
            with pytest.raises(OSError, match="Input/output"):
                file.append(b"[]")
        file.append(b"[]", b"[1]")
    assert path.read_bytes() == b"{}\n[]\n[1]\n"


def test_full_disk_is_the_error_that_the_caller_sees() -> None:
    with LineFile(Path("/dev/full")) as file, pytest.raises(OSError, match="No space left"):
        file.append(b"{}")


def test_file_that_is_closed_twice_is_closed(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "samples.jsonl")
    file.close()
    file.close()


def test_unfinished_file_is_readable_by_its_owner_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    chmod = Path.chmod

    def recorded(path: Path, mode: int) -> None:
        seen.append(path.stat().st_mode & 0o777)
        chmod(path, mode)

    monkeypatch.setattr(Path, "chmod", recorded)
    write_file(tmp_path / "secret", b"word", mode=0o640)
    assert seen == [0o600]
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o640
