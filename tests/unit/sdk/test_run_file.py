"""run.json: the record comes back, without secrets, written completely and only when it changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.errors import raises
from tests.unit.view.recorded import record

from gristmill import GristmillError
from gristmill.archive.run_file import RUN_FILE, read_run_file, write_run_file


def test_run_record_is_read_back_with_every_field(tmp_path: Path) -> None:
    trainer = {"seed": 3, "objective": "grpo", "batch_size": 8, "gradient_accumulation_steps": 2, "learning_rate": 1e-4}
    written = record(trainer=trainer, state="finished", creation="c0ffee")
    assert write_run_file(tmp_path / "new" / "run", written)
    assert read_run_file(tmp_path / "new" / "run" / RUN_FILE) == written
    assert [path.name for path in (tmp_path / "new" / "run").iterdir()] == [RUN_FILE]


def test_file_is_written_again_only_if_the_record_changed(tmp_path: Path) -> None:
    assert write_run_file(tmp_path, record())
    inode = (tmp_path / RUN_FILE).stat().st_ino
    assert not write_run_file(tmp_path, record())
    assert not write_run_file(tmp_path, record(version="1.9")), "a step alone does not change the file"
    assert (tmp_path / RUN_FILE).stat().st_ino == inode
    assert write_run_file(tmp_path, record(state="finished", version="1.60"))
    assert read_run_file(tmp_path / RUN_FILE).version == "1.60"


def test_version_is_in_the_file_of_a_finished_run_only(tmp_path: Path) -> None:
    write_run_file(tmp_path, record())
    assert read_run_file(tmp_path / RUN_FILE).version is None


def test_secrets_of_the_settings_are_not_in_the_file(tmp_path: Path) -> None:
    env = {"model": "tiny", "reward": {"api_key": "sk-abcdefgh12345"}, "url": "http://me:hunter2hunter@host/"}
    write_run_file(tmp_path, record(env=env, trainer={"hub_token": "hf_abcdefgh12345", "max_tokens": 8}))
    text = (tmp_path / RUN_FILE).read_text()
    for secret in ("sk-abcdefgh12345", "hunter2", "hf_abcdefgh12345"):
        assert secret not in text
    found = read_run_file(tmp_path / RUN_FILE)
    assert (found.env["model"], found.trainer) == ("tiny", {"hub_token": "***", "max_tokens": 8})


def test_failed_write_leaves_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run_file(tmp_path, record())

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_run_file(tmp_path, record(state="finished"))
    assert read_run_file(tmp_path / RUN_FILE).state == "open"
    assert [path.name for path in tmp_path.iterdir()] == [RUN_FILE]


def test_name_of_the_file_is_synced_again_after_its_folder_could_not_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []

    def fsync(handle: int) -> None:
        path = Path(f"/proc/self/fd/{handle}").readlink()
        if path == tmp_path:
            synced.append(path)
            if len(synced) == 1:
                raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.fsync", fsync)
    with pytest.raises(OSError, match="Input/output"):
        write_run_file(tmp_path, record())
    assert not write_run_file(tmp_path, record())
    assert synced == [tmp_path, tmp_path]


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ('{"format": 2, "run": {"more": 1}}', "run_file_format"),
        ('{"format": 1, "run": {}}', "not_a_run_file"),
        ("{}", "not_a_run_file"),
        ("", "not_a_run_file"),
        ("[1]", "not_a_run_file"),
    ],
)
def test_run_file_with_other_content_is_an_error_with_a_code(tmp_path: Path, content: str, code: str) -> None:
    (tmp_path / RUN_FILE).write_text(content)
    with raises(GristmillError, code):
        read_run_file(tmp_path / RUN_FILE)


def test_fields_of_a_later_api_are_ignored(tmp_path: Path) -> None:
    write_run_file(tmp_path, record())
    found = json.loads((tmp_path / RUN_FILE).read_text())
    found["run"]["later"] = 1
    (tmp_path / RUN_FILE).write_text(json.dumps(found))
    assert read_run_file(tmp_path / RUN_FILE).run_id == "quickstart"
