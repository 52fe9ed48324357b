"""What the containers of a stack can reach of each other and of the host."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import httpx
import pytest
from tests.support.compose import ComposeStack

REDIS_PORT = 6379
LISTEN = "0A"
"""The state of a listening socket in /proc/net/tcp."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposeStack]:
    with ComposeStack(tmp_path_factory.mktemp("isolation"), "gristmill-isolation", {}) as stack:
        stack.up("redis", "api", wait=True)
        yield stack


def test_redis_serves_the_api_and_listens_on_no_tcp_port(stack: ComposeStack) -> None:
    assert httpx.get(f"{stack.api_url}/readyz").status_code == 200
    rows = stack.compose("exec", "-T", "redis", "cat", "/proc/net/tcp", "/proc/net/tcp6").splitlines()
    assert [row for row in rows if LISTEN in row.split()] == []


def test_host_finds_no_redis_in_the_networks_of_the_stack(stack: ComposeStack) -> None:
    addresses = {service: stack.addresses(service) for service in ("redis", "api")}
    assert addresses["redis"] == []
    assert addresses["api"], "the test would try nothing"
    for address in addresses["api"]:
        with socket.socket() as probe:
            probe.settimeout(2)
            assert probe.connect_ex((address, REDIS_PORT)) != 0, address
