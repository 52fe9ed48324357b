"""Redis and the API as `make local` starts them after `make secure`: each role can do only its part."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import redis
from tests.integration.api.store_harness import RUN, trainer
from tests.support.atropos_reference import PYTHON as ATROPOS_PYTHON
from tests.support.errors import raises
from tests.support.groups import make_group
from tests.support.ports import free_port
from tests.support.stack import Output

from gristmill import ApiError, Deployment, PolicyVersion, SyncClient
from gristmill_cli.local.processes import LocalStack, LocalStackError
from gristmill_cli.local.secret_files import FILES, FOLDER, PASSWORD, ROLES, Secrets
from gristmill_cli.local.services import start_api, start_redis, token_files
from secure import main


@dataclass
class Secured:
    url: str
    redis_url: str
    secrets: Secrets
    output: Output
    stack: LocalStack

    def word(self, name: str) -> str:
        return self.secrets.path(name).read_text().strip()

    def client(self, role: str) -> SyncClient:
        """Creates a client as a service that the launcher starts creates it."""
        token = Deployment.read(token_files(role, self.secrets)).api_token
        assert token == self.word(role)
        return SyncClient(self.url, patience=10, token=token)


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[Secured]:
    main([], tmp_path)
    secrets = Secrets(tmp_path / FOLDER)
    output, port = Output(), free_port()
    url = f"http://127.0.0.1:{port}"
    with LocalStack(output.add) as stack:
        redis_url = start_redis(stack, tmp_path / "state", secrets)
        start_api(stack, {"GRISTMILL_API_URL": url}, redis_url, port, secrets)
        yield Secured(url, redis_url, secrets, output, stack)


def test_each_role_can_do_only_its_part_of_a_step(secured: Secured) -> None:
    with secured.client("env") as env, secured.client("trainer") as loop, secured.client("admin") as admin:
        env.create_run(RUN, {"dataset": "d"}, 2)
        incarnation, _ = loop.take(RUN, trainer(), [])
        loop.record_version(RUN, PolicyVersion(incarnation, 0))
        (permit,) = env.permits(RUN, "env-1", 1, wait=0).permits
        assert env.submit(make_group(permit.group_id, RUN, seed=1), "env-1")
        for stranger, needed in ((env, "trainer"), (loop, "admin")):
            with raises(ApiError, "forbidden") as refused:
                stranger.finish(RUN, incarnation) if stranger is env else stranger.close_run(RUN)
            assert refused.value.status == 403
            assert needed in refused.value.message
        with raises(ApiError, "forbidden") as refused:
            loop.create_run("other", {}, 2)
        assert "role env" in refused.value.message
        assert loop.lease(RUN, incarnation, "b1", 1, wait=0) is not None
        loop.ack(RUN, incarnation, ["b1"])
        assert env.status(RUN).trained == loop.status(RUN).trained == admin.status(RUN).trained == 1
        admin.close_run(RUN)
    with SyncClient(secured.url, patience=10) as nobody, raises(ApiError, "unauthorized") as refused:
        nobody.status(RUN)
    assert refused.value.status == 401


def test_token_in_the_url_allows_the_requests_of_its_role(secured: Secured) -> None:
    host = secured.url.removeprefix("http://")
    with httpx.Client() as http:
        assert http.get(f"http://env:{secured.word('env')}@{host}/v1/runs").status_code == 200
        assert http.get(f"http://env:{secured.word('env')}@{host}/metrics").status_code == 200
        assert http.get(f"{secured.url}/metrics").status_code == 401
        assert http.get(f"{secured.url}/readyz").status_code == 200


# BaseEnv and the stock trainer send no custom header: the token is in the URL.
ATROPOS = """
import asyncio, sys
import aiohttp, requests

env, trainer, host = sys.argv[1:]

async def environment():
    async with aiohttp.ClientSession() as session:
        settings = dict(max_token_length=8, desired_name="e", weight=1.0, group_size=2, min_batch_allocation=None)
        async with session.post(f"http://env:{env}@{host}/register-env", json=settings) as answer:
            yield answer.status
        group = dict(tokens=[[1, 2], [1, 3]], masks=[[-100, 2], [-100, 3]], scores=[0.0, 1.0])
        async with session.post(f"http://env:{env}@{host}/scored_data", json=group) as answer:
            yield answer.status
        async with session.get(f"http://env:{env}@{host}/batch") as answer:
            yield answer.status
        async with session.get(f"http://{host}/status") as answer:
            yield answer.status

async def main():
    names = dict(wandb_group="g", wandb_project="p", checkpoint_dir="c")
    numbers = dict(batch_size=2, max_token_len=8, save_checkpoint_interval=1, starting_step=0, num_steps=1)
    url = f"http://trainer:{trainer}@{host}"
    print(requests.post(f"{url}/register", json=names | numbers).status_code)
    print([status async for status in environment()])
    answer = requests.get(f"{url}/batch")
    print(answer.status_code, len(answer.json()["batch"]))

asyncio.run(main())
"""


def test_atropos_clients_may_send_the_token_in_their_url(secured: Secured) -> None:
    command = [str(ATROPOS_PYTHON), "-c", ATROPOS, secured.word("env"), secured.word("trainer")]
    done = subprocess.run(
        [*command, secured.url.removeprefix("http://")], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.splitlines() == ["200", "[200, 200, 403, 401]", "200 1"], done.stderr


def test_redis_refuses_clients_without_the_api_password(secured: Secured) -> None:
    with redis.Redis.from_url(secured.redis_url) as nobody, pytest.raises(redis.exceptions.AuthenticationError):
        nobody.ping()
    with redis.Redis.from_url(secured.redis_url, username="api", password=secured.word(PASSWORD)) as api:
        assert api.ping()


def test_no_secret_is_in_logs_command_lines_or_environments(secured: Secured) -> None:
    with secured.client("env") as env:
        env.create_run(RUN, {}, 2)
    httpx.post(f"{secured.url}/v1/runs", headers={"Authorization": f"Bearer {secured.word('trainer')}"})
    words = {name: secured.word(name) for name in (*ROLES, PASSWORD)}
    assert set(words) < set(FILES)
    shown = ""
    for service in secured.stack._services:
        process = Path(f"/proc/{service.process.pid}")
        shown += (process / "cmdline").read_text() + (process / "environ").read_text()
    assert "API_TOKENS_DIR" in shown
    secured.stack.stop()  # so that all lines are here
    shown += "\n".join(secured.output.lines)
    assert "code=forbidden" in shown
    assert not [name for name, word in words.items() if word in shown]


def test_stack_without_secrets_asks_for_no_token(tmp_path: Path) -> None:
    output, port = Output(), free_port()
    url = f"http://127.0.0.1:{port}"
    with LocalStack(output.add) as stack:
        redis_url = start_redis(stack, tmp_path, None)
        start_api(stack, {"GRISTMILL_API_URL": url}, redis_url, port, None)
        assert token_files("env", None) == {}
        assert httpx.get(f"{url}/v1/runs").status_code == 200
    assert "auth=none" in output.of("api")


def test_second_stack_does_not_start_a_redis_in_the_same_folder(tmp_path: Path) -> None:
    with LocalStack(Output().add) as first:
        start_redis(first, tmp_path, None)
        with LocalStack(Output().add) as second:
            with raises(LocalStackError, "state_in_use", path=tmp_path / "redis"):
                start_redis(second, tmp_path, None)
            assert not second.services
    with LocalStack(Output().add) as third:
        start_redis(third, tmp_path, None)
