"""Limits come from API_* variables; a wrong value is an error at the start."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from gristmill import ConfigError
from gristmill_api.settings import Limits, Settings

ROOT = Path(__file__).resolve().parents[3]


def test_defaults_and_overrides() -> None:
    assert Settings.read({}) == Settings()
    read = Settings.read({"REDIS_URL": "redis://redis:6379/0", "API_LEASE_TTL_S": "1.5", "API_MAX_ATTEMPTS": ""})
    assert read.redis_url == "redis://redis:6379/0"
    assert read.limits.lease_ttl_s == 1.5
    assert read.limits.max_attempts == 100, "an empty variable counts as unset"


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"API_LEASE_TTL_S": "0"}, "lease_ttl_s"),
        ({"API_LEASE_TTL_S": "inf"}, "lease_ttl_s"),
        ({"API_MAX_ATTEMPTS": "many"}, "max_attempts"),
        ({"API_MAX_ATTEMPT": "3"}, "did you mean API_MAX_ATTEMPTS?"),
        ({"API_ALLOWED_HOST": "rig"}, "did you mean API_ALLOWED_HOSTS?"),
        ({"API_ALLOWED_HOSTS": "http://rig"}, "API_ALLOWED_HOSTS"),
        ({"ATROPOS_RUN": ".."}, "ATROPOS_RUN='..' is not a valid run id"),
        ({"ATROPOS_RUN": ".hidden"}, "ATROPOS_RUN"),
        ({"ATROPOS_RUN": "a/b"}, "ATROPOS_RUN"),
        ({"ATROPOS_RUN": "default\n"}, "ATROPOS_RUN"),
        ({"ATROPOS_RUN": "r" * 65}, "ATROPOS_RUN"),
        ({"REDIS_URL": "localhost:6379"}, "redis://HOST:6379/0"),
        ({"REDIS_URL": "redis://[::1"}, "redis://HOST:6379/0"),
        ({"REDIS_URL": "unix://run/redis.sock"}, "unix:///PATH/OF/THE/SOCKET"),
        ({"REDIS_URL": "unix://"}, "unix:///PATH/OF/THE/SOCKET"),
    ],
)
def test_wrong_values_are_named(environ: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told.replace("?", r"\?")):
        Settings.read(environ)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("", "127.0.0.1:6379"),
        ("redis://api:s3cret@redis:7000/0?password=s3cret", "redis:7000"),
        ("unix:///run/redis/redis.sock?db=1", "/run/redis/redis.sock"),
        ("unix://api:s3cret@/run/redis/redis.sock", "/run/redis/redis.sock"),
    ],
)
def test_redis_address_names_host_or_socket_without_a_password(url: str, address: str) -> None:
    assert Settings.read({"REDIS_URL": url}).redis_address == address


def test_compose_passes_every_limit_to_the_api() -> None:
    api = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["api"]["environment"]
    names = [f"API_{limit.upper()}" for limit in Limits.model_fields]
    assert {name: api.get(name) for name in names} == {name: f"${{{name}:-}}" for name in names}


def test_variables_of_other_programs_are_left_alone() -> None:
    Settings.read({"API_KEY": "x", "API_TOKEN": "y", "PATH": "/bin"})
