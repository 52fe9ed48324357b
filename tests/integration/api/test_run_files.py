"""run.json follows a run: the settings when it opens and when a trainer takes it, and its end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis
from tests.integration.api.store_harness import trainer
from tests.support.api_server import ApiServer
from tests.support.grids import rest_is_long

from gristmill import PolicyVersion, RunRecord, RunState, SyncClient
from gristmill.archive.run_file import RUN_FILE, read_run_file
from gristmill_api.store import keys
from gristmill_api.store.runs import MOST_UNTAKEN_RUNS

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


def until_all_are_written(api: SyncClient, folder: Path) -> None:
    """Waits until the API has written the files of two new runs in turn. In between it looked at all runs."""
    for name in ("first", "second"):
        api.create_run(name, {}, 2, stack=name)
        until_written(folder / name / RUN_FILE, api.get_run(name))


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
    until_all_are_written(api, tmp_path)
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


def test_folder_of_a_run_that_made_room_before_a_trainer_took_it_is_removed(api: SyncClient, tmp_path: Path) -> None:
    for name in range(MOST_UNTAKEN_RUNS):
        api.create_run(f"untaken-{name}", {}, 2)
    until_written(tmp_path / "untaken-0" / RUN_FILE, api.get_run("untaken-0"))
    until_written(tmp_path / "untaken-1" / RUN_FILE, api.get_run("untaken-1"))
    (tmp_path / "untaken-1" / "notes.txt").write_text("A user's file")
    for name in range(2):
        api.create_run(f"new-{name}", {}, 2)
    until_all_are_written(api, tmp_path)
    assert not (tmp_path / "untaken-0").exists()
    assert read_run_file(tmp_path / "untaken-1" / RUN_FILE).state == RunState.FINISHED
    assert (tmp_path / "untaken-1" / "notes.txt").exists()


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
    until_all_are_written(api, tmp_path)
    assert server.log().count(f"file={RUN_FILE}") == 1
    (tmp_path / RUN).unlink()
    until_written(tmp_path / RUN / RUN_FILE, api.get_run(RUN))


def until_logged(server: ApiServer, text: str) -> None:
    deadline = time.monotonic() + 60
    while text not in server.log():
        assert time.monotonic() < deadline, server.log()
        time.sleep(0.1)


def lost_runs(server: ApiServer) -> list[str]:
    """Returns the samples of the metric."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return [line.split()[-1] for line in lines if line.startswith("gristmill_api_lost_runs ")]


@pytest.mark.parametrize("api_runs", rest_is_long(True, False), ids=["while the API runs", "before the API starts"])
def test_api_reports_open_runs_that_redis_has_lost(
    api: SyncClient, server: ApiServer, redis_url: str, tmp_path: Path, api_runs: bool
) -> None:
    for name in ("lost", "finished", "deleted"):
        api.create_run(name, {}, 2, stack=None)
        api.take(name, trainer(steps=3, groups=2), [])
        until_written(tmp_path / name / RUN_FILE, api.get_run(name))
    api.close_run("finished")
    api.close_run("deleted")
    api.delete_run("deleted")
    until_written(tmp_path / "finished" / RUN_FILE, api.get_run("finished"))
    deadline = time.monotonic() + 30
    while read_run_file(tmp_path / "deleted" / RUN_FILE).state != RunState.FINISHED:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert lost_runs(server) == ["0.0"]
    if not api_runs:
        server.stop()
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()  # As a server that cannot replay its file, or that started with another folder.
    if not api_runs:
        server.start()
    until_logged(server, "REDIS HAS LOST RUN lost [store_lost_run]")
    assert lost_runs(server) == ["1.0"]
    assert server.log().count("REDIS HAS LOST RUN") == 1, "once, and not of runs that had ended"
    (tmp_path / "lost" / RUN_FILE).unlink()
    until_logged(server, "run=lost lost=")
    assert lost_runs(server) == ["0.0"]


def test_api_reports_a_run_that_redis_has_in_an_older_state(
    api: SyncClient, server: ApiServer, redis_url: str, tmp_path: Path
) -> None:
    path = tmp_path / RUN / RUN_FILE
    api.create_run(RUN, {}, 2)
    with redis.Redis.from_url(redis_url) as client:
        before = client.hgetall(keys.record(RUN))
        for _ in range(2):
            api.take(RUN, trainer(steps=3, groups=2), [])
        newer = until_written(path, api.get_run(RUN))
        server.stop()
        client.hset(keys.record(RUN), mapping=before)
        server.start()
        until_logged(server, f"REDIS HAS LOST RUN {RUN} [store_lost_run]")
        assert read_run_file(path) == newer, "the file of the newer state stays"
        client.flushall()
        server.stop()
        server.start()
    api.create_run(RUN, {}, 2)  # As an environment that starts again.
    until_written(path, api.get_run(RUN))
    assert server.log().count(f"REDIS HAS LOST RUN {RUN} [store_lost_run]") >= 2
    assert lost_runs(server) == ["1.0"], "a new run of this id does not hide the loss"
