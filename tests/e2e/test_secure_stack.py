"""Redis and the API in containers after `make secure`: they read their secrets and expose them nowhere."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from tests.support.compose import ComposeStack
from tests.support.errors import raises

from gristmill import ApiError, SyncClient
from gristmill_cli.local.secret_files import FOLDER, PASSWORD, RANDOM, ROLES
from secure import OUTSIDE, main


@dataclass(frozen=True)
class Secured:
    """Redis and the API with the secrets of `folder`."""

    stack: ComposeStack
    secrets: dict[str, str]
    """The words in the secret files, by file."""
    folder: Path


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    root = tmp_path_factory.mktemp("secured")
    main([], root)
    with pytest.MonkeyPatch.context() as patch:
        for name in OUTSIDE:
            patch.setattr("sys.stdin", io.StringIO(f"secret-of-{name}\n"))
            main(["--set", name], root)
    folder = root / FOLDER
    secrets = {name: (folder / name).read_text().strip() for name in (*RANDOM, *OUTSIDE)}
    settings = {"API_AUTH": "token", "SECRETS_DIR": str(folder), "SECRETS_GID": str(folder.stat().st_gid)}
    settings |= {variable: str(folder / name) for name, variable in OUTSIDE.items()}
    with ComposeStack(root, "gristmill-secure", settings) as stack:
        stack.up("redis", "api", wait=True)
        yield Secured(stack, secrets, folder)


def test_tokens_and_the_password_work_in_containers(secured: Secured) -> None:
    stack, secrets = secured.stack, secured.secrets
    assert httpx.get(f"{stack.api_url}/readyz").status_code == 200
    assert httpx.get(f"{stack.api_url}/v1/runs").status_code == 401
    with SyncClient(stack.api_url, token=secrets["env"], patience=10) as env:
        env.create_run("a", {}, 2)
        with raises(ApiError, "forbidden"):
            env.close_run("a")
    with SyncClient(stack.api_url, token=secrets["admin"], patience=10) as admin:
        assert admin.close_run("a").state == "finished"
    redis = ["exec", "-T", "redis", "redis-cli", "-s", "/run/redis/redis.sock"]
    assert "NOAUTH" in stack.compose(*redis, "get", "gm:runs", check=False)
    assert "NOPERM" in stack.compose(*redis, "--user", "health", "--pass", "x", "get", "gm:runs", check=False)
    shown = stack.logs("api") + stack.logs("redis")
    shown += str([stack.inspect(service) for service in ("api", "redis")])
    assert not [name for name, word in secrets.items() if word in shown]


def test_close_needs_the_token_of_the_administrator(secured: Secured) -> None:
    stack, secrets = secured.stack, secured.secrets
    close = ["run", "--rm", "-T", "--no-deps"]
    with SyncClient(stack.api_url, token=secrets["env"], patience=10) as api:
        api.create_run("b", {}, 2)
        assert "[forbidden]" in stack.compose(*close, "env", "close", "b", check=False)
        assert api.get_run("b").state == "open"
        token = ["--volume", f"{secured.folder / 'admin'}:/run/secrets/admin:ro"]
        token += ["--env", "GRISTMILL_API_TOKEN_FILE=/run/secrets/admin"]
        stack.compose(*close, *token, "env", "close", "b")
        assert api.get_run("b").state == "finished"


def test_each_container_reads_only_its_own_secrets(secured: Secured) -> None:
    stack, secrets, read = secured.stack, secured.secrets, {}
    for service in ("redis", "api", "model", "trainer", "env", "agent"):
        show = ["--entrypoint", "sh", service, "-c", "cat /run/secrets/* /run/secrets/tokens/* 2>/dev/null"]
        shown = stack.compose("run", "--rm", "-T", "--no-deps", *show, check=False)
        read[service] = {name for name, word in secrets.items() if word in shown}
    assert read == {
        "redis": set(),  # the file holds the digest of the password
        "api": {*ROLES, PASSWORD},
        "model": {"hf_token"},
        "trainer": {"trainer", "hf_write_token", "wandb_api_key"},
        "env": {"env", "agent", "hf_token", "wandb_api_key"},
        "agent": {"agent"},
    }
