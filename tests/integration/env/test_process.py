"""Environments as processes: how they stop, share the work, and survive restarts of the other services."""

from __future__ import annotations

import signal
import time

import pytest
from tests.integration.env.conftest import Environments, HandTrainer
from tests.support.api_server import ApiServer
from tests.support.redis_server import RedisServer
from tests.support.stack import Vllm

from gristmill import SyncClient


def test_stopped_environment_returns_every_permit(environments: Environments, trainer: HandTrainer) -> None:
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 143)):
        env = environments.process(trainer.url)
        # The label is not a version, so work is under way and cannot end.
        trainer.take(label="default")
        _until_outstanding(trainer, 2)
        env.process.send_signal(number)
        assert environments.ends(env, timeout=30) == code
        status = trainer.api.status("sums")
        assert (status.outstanding, status.ready, status.dropped) == (0, 0, {})
    # The next environment gets the same rows, at once.
    environments.here(trainer.url)
    trainer.label("2.0")
    assert sorted(group.row for group in trainer.lease(wait=60)) == [0, 1]
    assert "Traceback" not in environments.output.of("env")


@pytest.mark.long
def test_two_replicas_share_the_rows(environments: Environments, trainer: HandTrainer) -> None:
    env = environments.process(trainer.url, "--max_num_workers", "1")
    other = environments.here(trainer.url, "--max_num_workers", "1")
    trainer.take(label="default")
    _until_outstanding(trainer, 2)  # one each
    trainer.label("1.0")
    groups = trainer.train(until=4)
    trainer.api.finish("sums", trainer.incarnation)
    assert environments.ends(env) == 0
    other.join()
    assert sorted(group.row for group in groups) == list(range(8))
    assert len({group.env_id for group in groups}) == 2


@pytest.mark.long
def test_kills_of_api_and_redis_pause_the_work_and_a_killed_environment_loses_none(
    environments: Environments, vllm: Vllm
) -> None:
    with RedisServer() as redis, ApiServer(redis.api_url, API_PERMIT_TTL_S="15") as api, SyncClient(api.url) as client:
        trainer = HandTrainer(client, vllm, "sums")
        env = environments.process(api.url)
        trainer.take()
        trainer.train(until=1)
        for part, label in ((api, None), (redis, "default")):
            part.kill()
            time.sleep(2)
            assert env.exit_code is None
            part.start()
            trainer.train(until=trainer.step + 1, label=label)
        # The label is not a version, so work on the third step has begun and cannot end.
        _until_outstanding(trainer, 2)
        env.process.kill()
        environments.ends(env)
        env = environments.process(api.url)
        trainer.label("1.3")
        trainer.train(until=4)  # the dead process's permits expire after 15 s
        client.finish("sums", trainer.incarnation)
        assert environments.ends(env) == 0
        audit = client.audit("sums")
        assert sorted(audit.trained) == [f"g{row:08d}" for row in range(8)]
        assert [*audit.dead, *audit.dropped, *audit.ready, *audit.leased, *audit.outstanding] == []


def _until_outstanding(trainer: HandTrainer, permits: int) -> None:
    deadline = time.monotonic() + 60
    while trainer.api.status("sums").outstanding != permits:
        assert time.monotonic() < deadline, trainer.api.status("sums")
        time.sleep(0.1)
