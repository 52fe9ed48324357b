"""The output of `docker compose config` for compose.yaml, as cloned and after `make secure`. Needs no engine."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gristmill_cli.local.secret_files import ACL, FILES, FOLDER, PASSWORD, RANDOM
from secure import OUTSIDE, ROOT, main


@pytest.fixture(scope="session", autouse=True)
def images() -> None:
    """None is needed here."""


@pytest.fixture(scope="module", params=["no-auth", "secured"])
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], Path]:
    """Returns the output of `docker compose config` for a checkout, before and after `make secure`."""
    root: Path = tmp_path_factory.mktemp(request.param)
    shutil.copy(ROOT / "compose.yaml", root)
    shutil.copytree(ROOT / "compose", root / "compose")
    if request.param == "secured":
        main([], root)
        for name in OUTSIDE:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("sys.stdin", io.StringIO(f"secret-{name}\n"))
                main(["--set", name], root)
    environ = {"PATH": os.environ["PATH"]}  # no variable of the caller interferes
    done = subprocess.run(
        ["docker", "compose", "config"], cwd=root, check=True, capture_output=True, text=True, env=environ
    )
    config: dict[str, Any] = yaml.safe_load(done.stdout)
    return request.param, config, root


def test_compose_mounts_each_service_its_own_secrets(stack: tuple[str, dict[str, Any], Path]) -> None:
    kind, config, root = stack
    folder = root / FOLDER if kind == "secured" else root / "compose" / "no-auth"
    files = {name: Path(secret["file"]) for name, secret in config["secrets"].items() if name != "ca"}
    of_the_stack = {path for name, path in files.items() if name not in OUTSIDE}
    assert {path.parent for path in of_the_stack} == {folder}
    assert {path.name for path in of_the_stack} == set(FILES)
    outside = root / FOLDER if kind == "secured" else None
    unset = root / "compose" / "no-auth" / "unset"
    assert {name: files[name] for name in OUTSIDE} == {name: outside / name if outside else unset for name in OUTSIDE}
    mounted = {
        name: {
            secret["target"]: secret["source"] if secret["source"] in OUTSIDE else files[secret["source"]].name
            for secret in service.get("secrets", [])
        }
        for name, service in config["services"].items()
    }
    assert mounted == {
        "redis": {"/run/secrets/users.acl": ACL},
        "api": {
            "/run/secrets/tokens/env": "env",
            "/run/secrets/tokens/trainer": "trainer",
            "/run/secrets/tokens/admin": "admin",
            "/run/secrets/redis_password": PASSWORD,
        },
        "trainer": {
            "/run/secrets/token_trainer": "trainer",
            "/run/secrets/hf_write_token": "hf_write_token",
            "/run/secrets/wandb_api_key": "wandb_api_key",
        },
        "env": {
            "/run/secrets/token_env": "env",
            "/run/secrets/token_agent": "agent",
            "/run/secrets/hf_token": "hf_token",
            "/run/secrets/wandb_api_key": "wandb_api_key",
        },
        "model": {"/run/secrets/hf_token": "hf_token"},
        "model-port": {},
    }
    group = str(folder.stat().st_gid) if kind == "secured" else "10001"
    for name, service in config["services"].items():
        assert service.get("group_add", []) == ([group] if mounted[name] else [])
    assert config["services"]["api"]["environment"]["API_AUTH"] == ("token" if kind == "secured" else "none")
    assert config["services"]["env"]["environment"]["GRISTMILL_API_TOKEN_FILE"] == "/run/secrets/token_env"
    assert config["services"]["trainer"]["environment"]["GRISTMILL_API_TOKEN_FILE"] == "/run/secrets/token_trainer"


def test_docker_compose_config_contains_no_secret(stack: tuple[str, dict[str, Any], Path]) -> None:
    """`docker inspect` shows environment, command and labels. All of them are in this text."""
    kind, config, root = stack
    if kind == "secured":
        for name in (*RANDOM, *OUTSIDE):
            assert (root / FOLDER / name).read_text().strip() not in yaml.safe_dump(config)
