"""Network access of the stack's containers to each other and to the host."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from typing import NamedTuple

import httpx
import pytest
from tests.support.compose import ROOT, ComposeStack

REDIS_PORT = 6379
LISTEN = "0A"
"""The state of a listening socket in /proc/net/tcp."""

SERVICES = ("redis", "api", "model", "model-port", "trainer", "env")
IN_MEMORY = {service: {"/tmp"} for service in SERVICES} | {"env": {"/tmp", "/home/gristmill"}}

TRY_EACH_MOUNT = r"""
cut -d' ' -f2 /proc/mounts | grep -Ev '^/(proc|sys|dev|etc|run/secrets)(/|$)|/docker-init$' |
while read -r path; do
    if touch "$path/.probe" 2>/dev/null; then rm "$path/.probe"; echo "probed $path writes"
    elif ls "$path" >/dev/null; then echo "probed $path reads"
    else echo "probed $path nothing"
    fi
done
"""


class Mount(NamedTuple):
    """One cell of the table."""

    volume: str
    path: str
    verb: str


def documented_mounts() -> dict[str, set[Mount]]:
    """By service: the table of docs/security.md. `model-port` is not in the table, because it has no volume."""
    mounts: dict[str, set[Mount]] = {service: set() for service in SERVICES}
    lines = iter((ROOT / "docs" / "security.md").read_text().splitlines())
    header = next(line for line in lines if line.startswith("| volume |"))
    services = [cell.strip() for cell in header.split("|")][1:-1]
    for line in lines:
        if not line.startswith("|"):
            break
        cells = line.split("|")[1:-1]
        for service, cell in zip(services, cells, strict=True):
            for verb, path in re.findall(r"(reads|writes) `(/[^`]*)`", cell):
                mounts[service].add(Mount(cells[0].strip(" `"), path, verb))
    assert {service for service, found in mounts.items() if found} == set(SERVICES) - {"model-port"}
    return mounts


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


def test_compose_mounts_the_volumes_that_the_documentation_names(stack: ComposeStack) -> None:
    config = json.loads(stack.compose("config", "--format", "json"))
    mounted = {
        name: {
            Mount(
                mount["source"].replace(f"{ROOT}/", "./"),
                mount["target"],
                "reads" if mount.get("read_only") else "writes",
            )
            for mount in service.get("volumes", [])
        }
        for name, service in config["services"].items()
    }
    assert mounted == documented_mounts()


@pytest.mark.parametrize("service", SERVICES)
def test_container_writes_to_the_mounts_that_the_documentation_names(stack: ComposeStack, service: str) -> None:
    output = stack.compose("run", "--rm", "-T", "--no-deps", "--entrypoint", "sh", service, "-c", TRY_EACH_MOUNT)
    found = dict(re.findall(r"^probed (\S+) (\w+)", output, re.MULTILINE))
    documented = {mount.path: mount.verb for mount in documented_mounts()[service]}
    assert found == {"/": "reads"} | documented | dict.fromkeys(IN_MEMORY[service], "writes")


@pytest.mark.parametrize("service", SERVICES)
def test_container_has_limited_resources_and_privileges(stack: ComposeStack, service: str) -> None:
    stack.compose("create", "--no-recreate")
    shown = stack.inspect(service)
    host = shown["HostConfig"]
    assert host["ReadonlyRootfs"]
    assert host["CapDrop"] == ["ALL"]
    assert host["CapAdd"] is None
    assert not host["Privileged"]
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    assert shown["Config"]["User"] in {"gristmill", "999:999"}
    assert 0 < host["PidsLimit"] <= 4096
    bound = {"trainer": 10, "env": 10}.get(service, 0)
    policy = "on-failure" if bound else "unless-stopped"
    assert host["RestartPolicy"] == {"Name": policy, "MaximumRetryCount": bound}
    assert shown["Config"]["Healthcheck"]["Test"]
    assert 0 < host["Memory"] <= 16 << 30
    assert set(host["Tmpfs"]) == IN_MEMORY[service]
    assert all("size=" in options for options in host["Tmpfs"].values())


OFFLINE_WANDB_RUN = """
import os
from pathlib import Path
from gristmill.internal.tracking import start_wandb
run = start_wandb("probe", "env", {}, Path("/runs/probe"), os.environ)
run.log({"x": 1})
run.finish()
print("kept", [path.name for path in Path("/runs/probe/wandb").glob("offline-run-*/*.wandb")])
"""


@pytest.mark.parametrize("service", ["trainer", pytest.param("env", marks=pytest.mark.long)])
def test_wandb_logs_offline_in_a_read_only_container(stack: ComposeStack, service: str) -> None:
    output = stack.compose("run", "--rm", "-T", "--no-deps", "--entrypoint", "python", service, "-c", OFFLINE_WANDB_RUN)
    assert re.search(r"kept \['run-\w+\.wandb'\]", output), output
