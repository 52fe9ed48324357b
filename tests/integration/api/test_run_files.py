"""run.json follows a run: the settings when it opens and when a trainer takes it, and its end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.api.store_harness import trainer
from tests.support.api_server import ApiServer

from gristmill import PolicyVersion, RunRecord, RunState, SyncClient
from gristmill.archive.run_file import RUN_FILE, read_run_file
from gristmill_api.archive import run_files

RUN = "run-1"


@pytest.fixture
def server(redis_url: str, tmp_path: Path) -> Iterator[ApiServer]:
    with ApiServer(redis_url, GRISTMILL_RUNS_DIR=str(tmp_path), API_ARCHIVE_MIN_FREE_BYTES="0") as server:
        yield server


@pytest.fixture
def api(server: ApiServer) -> Iterator[SyncClient]:
    with SyncClient(server.url, patience=20) as client:
        yield client


def until_written(path: Path, like: RunRecord) -> RunRecord:
    """Waits until the file has the record, except its version if the run is not finished."""
    if like.state != RunState.FINISHED:
        like = like.model_copy(update={"version": None})
    deadline = time.monotonic() + 30
    while not path.exists() or (found := read_run_file(path)) != like:
        assert time.monotonic() < deadline, path.read_text() if path.exists() else "no file"
        time.sleep(0.1)
    return found


def test_file_follows_the_run_from_its_opening_to_its_end(api: SyncClient, server: ApiServer, tmp_path: Path) -> None:
    path = tmp_path / RUN / RUN_FILE
    api.create_run(RUN, {"dataset": "d", "trainer": {"seed": 7}}, 2)
    assert until_written(path, api.get_run(RUN)).trainer is None
    incarnation, _ = api.take(RUN, {**trainer(steps=3, groups=2), "objective": "grpo"}, [])
    found = until_written(path, api.get_run(RUN))
    assert (found.trainer or {})["objective"] == "grpo"
    assert (found.env["trainer"], found.training_steps, found.groups_per_step) == ({"seed": 7}, 3, 2)
    inode = path.stat().st_ino
    api.record_version(RUN, PolicyVersion(incarnation, 1))
    time.sleep(2 * run_files._PERIOD_S)
    assert path.stat().st_ino == inode, "a published version alone does not write the file"
    api.finish(RUN, incarnation)
    server.stop()  # The API writes the last changes when it ends.
    found = read_run_file(path)
    assert (found.state, found.version) == ("finished", f"{incarnation}.1")


def test_file_of_an_extended_run_is_open_again(api: SyncClient, tmp_path: Path) -> None:
    path = tmp_path / RUN / RUN_FILE
    api.create_run(RUN, {"trainer": {"training_steps": 3}}, 2)
    incarnation, _ = api.take(RUN, trainer(steps=3, groups=2), [])
    api.finish(RUN, incarnation)
    until_written(path, api.get_run(RUN))
    api.create_run(RUN, {"trainer": {"training_steps": 9}}, 2)
    found = until_written(path, api.get_run(RUN))
    assert (found.state, found.env["trainer"]) == ("open", {"training_steps": 9})


def test_api_that_starts_again_writes_nothing_new_and_no_folder_that_was_removed(
    api: SyncClient, server: ApiServer, tmp_path: Path
) -> None:
    for name in ("kept", "removed"):
        api.create_run(name, {}, 2, stack=None)
        api.close_run(name)
    for name in ("kept", "removed"):
        until_written(tmp_path / name / RUN_FILE, api.get_run(name))
    inode = (tmp_path / "kept" / RUN_FILE).stat().st_ino
    (tmp_path / "removed" / RUN_FILE).unlink()
    (tmp_path / "removed").rmdir()
    server.stop()
    server.start()
    api.create_run("later", {}, 2, stack=None)
    until_written(tmp_path / "later" / RUN_FILE, api.get_run("later"))
    assert (tmp_path / "kept" / RUN_FILE).stat().st_ino == inode
    assert not (tmp_path / "removed").exists()


def test_disk_that_fails_delays_no_request_and_is_logged_once(
    api: SyncClient, server: ApiServer, tmp_path: Path
) -> None:
    (tmp_path / RUN).write_text("a file where the run's folder should be")
    api.create_run(RUN, {}, 2)
    deadline = time.monotonic() + 30
    while f"file={RUN_FILE}" not in server.log():
        assert time.monotonic() < deadline, server.log()
        time.sleep(0.1)
    api.take(RUN, trainer(steps=3, groups=2), [])
    time.sleep(2 * run_files._PERIOD_S)
    assert server.log().count(f"file={RUN_FILE}") == 1
    (tmp_path / RUN).unlink()
    until_written(tmp_path / RUN / RUN_FILE, api.get_run(RUN))
