"""Limits come from API_* variables; a wrong value is an error at the start."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import yaml
from tests.support.errors import raises

from gristmill import ConfigError
from gristmill_api import server
from gristmill_api.settings import Limits, Settings

ROOT = Path(__file__).resolve().parents[3]


ATROPOS_RUN = {"variable": "ATROPOS_RUN"}
REDIS_URL = {"variable": "REDIS_URL"}


def test_settings_override_defaults_and_ignore_empty_variables() -> None:
    assert Settings.read({}) == Settings()
    read = Settings.read({"REDIS_URL": "redis://redis:6379/0", "API_LEASE_TTL_S": "1.5", "API_MAX_ATTEMPTS": ""})
    assert read.redis_url == "redis://redis:6379/0"
    assert read.limits.lease_ttl_s == 1.5
    assert read.limits.max_attempts == 100, "an empty variable counts as unset"


@pytest.mark.parametrize(
    ("environ", "code", "values"),
    [
        ({"API_LEASE_TTL_S": "0"}, "invalid_settings", {"problems": {"lease_ttl_s": "greater_than"}}),
        ({"API_LEASE_TTL_S": "inf"}, "invalid_settings", {"problems": {"lease_ttl_s": "finite_number"}}),
        ({"API_MAX_ATTEMPTS": "many"}, "invalid_settings", {"problems": {"max_attempts": "int_parsing"}}),
        ({"API_MAX_ATTEMPT": "3"}, "variable_unknown", {"nearest": "API_MAX_ATTEMPTS"}),
        ({"API_ALLOWED_HOST": "rig"}, "variable_unknown", {"nearest": "API_ALLOWED_HOSTS"}),
        ({"API_ALLOWED_HOSTS": "http://rig"}, "host_name", {"variable": "API_ALLOWED_HOSTS"}),
        ({"ATROPOS_RUN": ".."}, "variable_invalid", ATROPOS_RUN),
        ({"ATROPOS_RUN": ".hidden"}, "variable_invalid", ATROPOS_RUN),
        ({"ATROPOS_RUN": "-rf"}, "variable_invalid", ATROPOS_RUN),
        ({"ATROPOS_RUN": "_a"}, "variable_invalid", ATROPOS_RUN),
        ({"ATROPOS_RUN": "a/b"}, "variable_invalid", ATROPOS_RUN),
        ({"ATROPOS_RUN": "default\n"}, "variable_invalid", ATROPOS_RUN),
        ({"ATROPOS_RUN": "r" * 65}, "variable_invalid", ATROPOS_RUN),
        ({"REDIS_URL": "localhost:6379"}, "variable_invalid", REDIS_URL),
        ({"REDIS_URL": "redis://[::1"}, "variable_invalid", REDIS_URL),
        ({"REDIS_URL": "unix://run/redis.sock"}, "variable_invalid", REDIS_URL),
        ({"REDIS_URL": "unix://"}, "variable_invalid", REDIS_URL),
        ({"REDIS_URL": "redis+sentinel://one:26379"}, "variable_invalid", REDIS_URL),
        ({"REDIS_URL": "redis+sentinel://one,,two/mymaster"}, "variable_invalid", REDIS_URL),
        ({"REDIS_URL": "redis://redis/0?wait_replicas=one"}, "variable_invalid", REDIS_URL),
    ],
)
def test_wrong_values_are_named(environ: dict[str, str], code: str, values: dict[str, Any]) -> None:
    with raises(ConfigError, code, **values):
        Settings.read(environ)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("", "127.0.0.1:6379"),
        ("redis://api:s3cret@redis:7000/0?password=s3cret", "redis:7000"),
        ("unix:///run/redis/redis.sock?db=1", "/run/redis/redis.sock"),
        ("unix://api:s3cret@/run/redis/redis.sock", "/run/redis/redis.sock"),
        ("rediss+sentinel://api:s3cret@one,two:7000/main?db=1", "main of Sentinels one:26379,two:7000"),
    ],
)
def test_redis_address_names_host_or_socket_without_a_password(url: str, address: str) -> None:
    assert Settings.read({"REDIS_URL": url}).redis_address == address


def test_compose_passes_every_limit_to_the_api() -> None:
    api = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["api"]["environment"]
    names = [f"API_{limit.upper()}" for limit in Limits.model_fields]
    assert {name: api.get(name, "absent") for name in names} == dict.fromkeys(names)


def test_all_services_of_compose_find_the_model_servers_by_the_same_name() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    url = "dns+http://model:9001"
    page = Settings.read({"API_VIEW_SERVERS": services["api"]["environment"]["API_VIEW_SERVERS"]})
    assert page.view_servers == (url,)
    assert services["model-port"]["command"][1] == url
    assert "ports" not in services["model"], "one port of the host cannot belong to several containers"


@pytest.mark.parametrize("hard", [128, 200, 255])
def test_too_few_descriptors_for_connections_are_an_error(monkeypatch: pytest.MonkeyPatch, hard: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (hard, hard))
    monkeypatch.setattr(sys, "argv", ["gristmill_api"])
    monkeypatch.setattr(uvicorn.main, "main", lambda *args, **options: None)
    with pytest.raises(SystemExit, match=r"^error \[too_few_descriptors\]"):
        server.main()


def test_variables_of_other_programs_are_left_alone() -> None:
    Settings.read({"API_KEY": "x", "API_TOKEN": "y", "PATH": "/bin"})
