"""A run that has ended gets one report, after its environments have left and its groups are archived."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis import Redis
from tests.integration.api.store_harness import trainer
from tests.support.api_server import ApiServer
from tests.support.groups import make_group

from gristmill import PolicyVersion, SyncClient
from gristmill_api.store import keys

RUN = "run-1"


@pytest.fixture
def server(redis_url: str, tmp_path: Path) -> Iterator[ApiServer]:
    with ApiServer(
        redis_url, GRISTMILL_RUNS_DIR=str(tmp_path), API_ARCHIVE_MIN_FREE_BYTES="0", API_ENV_TTL_S="3600"
    ) as server:
        yield server


@pytest.fixture
def api(server: ApiServer) -> Iterator[SyncClient]:
    with SyncClient(server.url, patience=20) as client:
        yield client


def until(condition: Callable[[], object], server: ApiServer) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline, server.log()
        time.sleep(0.1)


def trained(api: SyncClient, run: str = RUN) -> int:
    """Trains two steps of a run, whose environment is registered. Returns the trainer's incarnation."""
    api.create_run(run, {"dataset": "d", "trainer": {"seed": 7}}, 2, stack=None)
    incarnation, _ = api.take(run, trainer(steps=2, groups=2), [])
    api.record_version(run, PolicyVersion(incarnation, 0))
    api.register_env(run, "env-1")
    for step in (1, 2):
        for permit in api.permits(run, "env-1", 2, wait=5).permits:
            api.submit(make_group(permit.group_id, run, version=f"{incarnation}.{step - 1}"), "env-1")
        assert api.lease(run, incarnation, f"b{step}", 2, wait=5) is not None
        api.report_metrics(run, "trainer", step, {"reward_mean": step / 4, "seconds": {"train": 0.5}})
        api.ack(run, incarnation, [f"b{step}"])
        api.record_version(run, PolicyVersion(incarnation, step))
    return incarnation


def until_all_are_considered(api: SyncClient, server: ApiServer, folder: Path, run: str) -> None:
    """Waits for the report of a run that ends now. The API considered all runs that ended earlier before it."""
    incarnation = trained(api, run)
    api.leave_env(run, "env-1")
    api.finish(run, incarnation)
    until((folder / run / "report.html").exists, server)


def test_report_is_written_once_after_the_environments_have_left(
    api: SyncClient, server: ApiServer, redis_url: str, tmp_path: Path
) -> None:
    incarnation = trained(api)
    path = tmp_path / RUN / "report.html"
    api.finish(RUN, incarnation)
    until(lambda: api.status(RUN).archiving == 0, server)
    until_all_are_considered(api, server, tmp_path, "next")
    assert not path.exists(), "the environment may still evaluate"
    api.report_metrics(RUN, "eval", 2, {"pass@1": 0.75, "pass@1_stderr": 0.1, "prompts": 40})
    api.leave_env(RUN, "env-1")
    until(path.exists, server)
    text = path.read_text(encoding="utf-8")
    for part in (f"Run {RUN}", "trainer.seed", "75 %", "trained; 0 dropped"):
        assert part in text
    assert path.stat().st_size < 200_000
    assert {one.name for one in path.parent.iterdir()} == {"rollouts", "run.json", "report.html"}, "no table is made"
    written = path.stat().st_mtime_ns
    server.stop()
    with Redis.from_url(redis_url) as redis:  # as if the claim of the first process had expired
        redis.delete(keys.prefix(RUN) + "claims", keys.prefix(RUN) + "claimants")
    server.start()
    until_all_are_considered(api, server, tmp_path, "later")
    assert path.stat().st_mtime_ns == written


def test_folder_that_a_user_removed_stays_away(
    api: SyncClient, server: ApiServer, redis_url: str, tmp_path: Path
) -> None:
    until_all_are_considered(api, server, tmp_path, RUN)
    server.stop()
    shutil.rmtree(tmp_path / RUN)
    with Redis.from_url(redis_url) as redis:  # as if the claim of the first process had expired
        redis.delete(keys.prefix(RUN) + "claims", keys.prefix(RUN) + "claimants")
    server.start()
    until_all_are_considered(api, server, tmp_path, "later")
    assert not (tmp_path / RUN).exists()


def test_run_that_was_extended_gets_another_report_by_another_process(
    api: SyncClient, server: ApiServer, tmp_path: Path
) -> None:
    incarnation = trained(api)
    api.leave_env(RUN, "env-1")
    api.finish(RUN, incarnation)
    path = tmp_path / RUN / "report.html"
    until(path.exists, server)
    server.stop()
    server.start()
    api.create_run(RUN, {"dataset": "d", "trainer": {"seed": 7, "training_steps": 4}}, 2, stack=None)
    incarnation, _ = api.take(RUN, trainer(steps=4, groups=2), [], step=2)
    path.unlink()
    api.finish(RUN, incarnation)
    until(path.exists, server)


def test_report_that_fails_is_one_line_of_the_log_and_requests_are_answered(
    api: SyncClient, server: ApiServer, tmp_path: Path
) -> None:
    incarnation = trained(api)
    (tmp_path / RUN / "report.html").mkdir(parents=True)
    api.finish(RUN, incarnation)
    api.leave_env(RUN, "env-1")
    until(lambda: "report run=run-1 why=" in server.log(), server)
    until_all_are_considered(api, server, tmp_path, "next")
    assert server.log().count("report run=run-1 why=") == 1
    assert api.get_run(RUN).state == "finished"


def test_run_without_a_trained_group_has_no_report(api: SyncClient, server: ApiServer, tmp_path: Path) -> None:
    api.create_run("empty", {}, 2, stack=None)
    api.close_run("empty")
    incarnation = trained(api)
    api.leave_env(RUN, "env-1")
    api.finish(RUN, incarnation)
    until((tmp_path / RUN / "report.html").exists, server)
    assert not (tmp_path / "empty" / "report.html").exists()
