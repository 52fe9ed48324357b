"""The views of a run over a live API: the reader, and the commands `status`, `tail` and `runs`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from tests.integration.api.store_harness import trainer
from tests.support.api_server import ApiServer
from tests.support.errors import raises
from tests.support.fault_proxy import Fault, FaultProxy, Way
from tests.support.groups import make_group

from gristmill import ApiError, PolicyVersion, SyncClient
from gristmill_api.store import keys
from gristmill_view.facts import ApiReader, find_run
from gristmill_view.overview import overview

RUN = "sums"


@pytest.fixture
def api(redis_url: str, shared_api: ApiServer) -> Iterator[SyncClient]:
    """The client to the API over an empty Redis."""
    with SyncClient(shared_api.url, patience=0) as client:
        yield client


class Run:
    """A run whose environment and trainer are this test."""

    def __init__(self, api: SyncClient) -> None:
        self.api = api
        api.create_run(RUN, {"dataset": "sums", "trainer": {"learning_rate": 0.1}}, 2)

    def take(self) -> None:
        self.incarnation, _ = self.api.take(RUN, trainer(steps=3, groups=2), [])
        self.api.record_version(RUN, PolicyVersion(self.incarnation, 0))
        self.api.register_env(RUN, "env-1")

    def generate(self, groups: int = 2) -> None:
        for permit in self.api.permits(RUN, "env-1", groups, wait=5).permits:
            self.api.submit(make_group(permit.group_id, RUN, seed=permit.row, rewards=[1.0, 0.0]), "env-1")

    def train(self, step: int) -> None:
        assert self.api.lease(RUN, self.incarnation, f"b{step}", 2, wait=5) is not None
        values = {"reward_mean": step / 4, "tokens": 40, "seconds": {"train": 0.5}, "reward_parts": {"length": 0.5}}
        self.api.report_metrics(RUN, "trainer", step, values)
        self.api.ack(RUN, self.incarnation, [f"b{step}"])
        self.api.record_version(RUN, PolicyVersion(self.incarnation, step))


def test_reader_follows_a_run_from_its_start_to_its_end(api: SyncClient) -> None:
    run = Run(api)
    reader = ApiReader(api, RUN)
    found = overview(reader.read())
    assert (found.phase, [waiting.who for waiting in found.waiting]) == ("waits for a trainer", ["environment"])
    run.take()
    run.generate()
    run.train(1)
    found = overview(reader.read())
    assert (found.step, found.steps, found.reward, found.seconds_left) == (1, 3, 0.25, 1.0)
    assert found.queue.trained == 2
    assert found.settings["trainer.learning_rate"] == 0.1
    run.generate()
    run.train(2)
    api.report_metrics(RUN, "eval", 2, {"pass@1": 0.5, "pass@1_stderr": 0.1, "prompts": 4})
    deadline = time.monotonic() + 10
    while True:
        found = overview(reader.read())
        services = {service.name: service for service in found.services}
        if services["trainer"].heartbeat_s is not None and services["env env-1"].heartbeat_s is not None:
            break
        assert time.monotonic() < deadline, "no event reached the reader"
        time.sleep(0.05)
    assert (found.step, found.reward, found.trouble) == (2, 0.5, None)
    assert [(point.step, point.score, point.n) for point in found.evaluations] == [(2, 0.5, 4)]
    assert services["env env-1"].state == "waiting"
    assert services["trainer"].heartbeat_s < 10
    api.finish(RUN, run.incarnation)
    found = overview(reader.read())
    assert (found.state, found.seconds_left, found.waiting) == ("finished", 0.0, [])


def test_reader_forgets_metrics_of_the_trainer_that_was_replaced(api: SyncClient) -> None:
    run = Run(api)
    run.take()
    reader = ApiReader(api, RUN, follow=False)
    run.generate()
    run.train(1)
    assert overview(reader.read()).reward == 0.25
    run.take()
    api.report_metrics(RUN, "trainer", 1, {"reward_mean": 0.75})
    assert overview(reader.read()).reward == 0.75


def test_reader_forgets_all_rows_of_a_run_that_was_deleted(api: SyncClient, redis_url: str) -> None:
    run = Run(api)
    run.take()
    api.report_metrics(RUN, "trainer", 1, {"reward_mean": 0.25})
    api.report_metrics(RUN, "eval", 1, {"pass@1": 1.0, "prompts": 4})
    reader = ApiReader(api, RUN, follow=False)
    assert [len(rows) for rows in (reader.read().rows, reader.read().evaluations)] == [1, 1]
    with redis.Redis.from_url(redis_url) as store:
        store.flushall()
    run = Run(api)
    run.take()
    assert [len(rows) for rows in (reader.read().rows, reader.read().evaluations)] == [0, 0]


def test_reader_of_a_missing_run_raises_the_error_of_the_api(api: SyncClient) -> None:
    with raises(ApiError, "run_missing"):
        ApiReader(api, "nowhere", follow=False).read()


def test_environment_that_misses_two_heartbeats_is_down(api: SyncClient, redis_url: str) -> None:
    run = Run(api)
    run.take()
    api.register_env(RUN, "env-1", heartbeat_s=20)
    api.register_env(RUN, "by-hand")  # it promises no heartbeats
    run.generate()
    reader = ApiReader(api, RUN, follow=False)
    assert overview(reader.read()).trouble is None
    with redis.Redis.from_url(redis_url) as store:
        store.zincrby(keys.prefix(RUN) + "envs", -45_000, "env-1")  # The environment called 45 s earlier.
    found = overview(reader.read())
    states = {service.name: service.state for service in found.services}
    assert states["env env-1"] == "down"
    assert found.trouble is not None
    assert found.trouble.code == "environment_silent"
    assert states["env by-hand"] == "waiting"
    api.heartbeat_env(RUN, "env-1")
    found = overview(reader.read())
    assert {service.name: service.state for service in found.services}["env env-1"] == "waiting"
    assert found.trouble is None


def test_find_run_prefers_the_open_run(api: SyncClient) -> None:
    assert find_run(api) is None
    Run(api)
    api.create_run("later", {}, 2, stack=None)
    api.close_run("later")
    assert find_run(api) == RUN


def gristmill(api: SyncClient, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Starts the program in an empty folder."""
    environ = {**os.environ, "GRISTMILL_API_URL": api.url, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "gristmill_cli", *arguments], cwd=folder, env=environ, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def output(process: subprocess.Popen[str]) -> str:
    try:
        text, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, text
    return text


def test_status_and_runs_over_the_api(api: SyncClient, tmp_path: Path) -> None:
    run = Run(api)
    run.take()
    run.generate()
    run.train(1)
    shown = output(gristmill(api, tmp_path, "status"))
    assert "sums  step 1 of 3" in shown
    assert "trainer waits for groups: 0 of 2 are ready" in shown
    found: dict[str, Any] = json.loads(output(gristmill(api, tmp_path, "status", "--json")))
    assert (found["step"], found["live"], found["queue"]["trained"]) == (1, True, 2)
    assert output(gristmill(api, tmp_path, "runs")).splitlines()[1] == "sums\topen\t1/3\t0.25\tTrue"


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_watched_status_survives_lost_answers_and_ends_with_the_run(
    api: SyncClient, tmp_path: Path, flags: list[str]
) -> None:
    run = Run(api)
    run.take()
    with FaultProxy(int(api.url.rpartition(":")[2])) as proxy, SyncClient(f"http://127.0.0.1:{proxy.port}") as cut:
        process = gristmill(cut, tmp_path, "status", "--watch", *flags)
        assert process.stdout is not None
        assert process.stdout.readline()
        proxy.set(Fault(answer=Way(reset_after=0), times=3))
        run.generate()
        run.train(1)
        line = ""
        while "step 1/3" not in line and '"step": 1,' not in line:
            line = process.stdout.readline()
            assert line
        api.finish(RUN, run.incarnation)
        assert "finished" in output(process)


def test_tail_prints_groups_as_they_come_and_ends_with_the_run(api: SyncClient, tmp_path: Path) -> None:
    run = Run(api)
    run.take()
    run.generate()
    process = gristmill(api, tmp_path, "tail", "--completions", "0")
    assert process.stdout is not None
    seen = ""
    while "g00000001" not in seen:  # the groups so far
        seen += (line := process.stdout.readline())
        assert line, seen
    run.train(1)
    run.generate()
    while "g00000003" not in seen:
        seen += (line := process.stdout.readline())
        assert line, seen
    api.finish(RUN, run.incarnation)
    seen += output(process)
    assert [seen.count(f"g{number:08d}") for number in range(4)] == [1, 1, 1, 1], seen
    assert "mean reward 0.500" in seen
    assert seen.count("  1.00  ") >= 3
