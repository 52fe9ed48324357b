"""The sandbox as a service of the stack: the environment reaches it, and a program in it reaches nothing. A run with
programs survives kills of sandbox and environment."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.compose import ComposeStack

from gristmill import ApiError, SyncClient
from gristmill_env.sandbox import URL

ASK = f"""
import asyncio, json, os, sys
from gristmill_env import sandbox
assert os.environ[{URL!r}] == "http://sandbox:9200"
async def main():
    programs = json.loads(sys.argv[1])
    print(json.dumps([await sandbox.python(program) for program in programs]))
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposeStack]:
    with ComposeStack(tmp_path_factory.mktemp("sandbox"), "gristmill-sandbox", {}) as stack:
        stack.compose("--profile", "sandbox", "up", "--detach", "--wait", "sandbox")
        yield stack


def outputs(stack: ComposeStack, *programs: str) -> list[str]:
    """Returns what the environment's container gets for each program."""
    words = ("run", "--rm", "--no-deps", "--entrypoint", "python", "env", "-c", ASK, json.dumps(programs))
    found = json.loads(stack.compose(*words).splitlines()[-1])
    assert isinstance(found, list)
    return found


def test_programs_of_the_environment_run_and_are_confined(stack: ComposeStack) -> None:
    found = outputs(
        stack,
        "print(6 * 7)",
        "import os; print(os.getuid(), sorted(os.environ))",
        "open('/etc/passwd')",
        "import os; os.kill(1, 9)",
        "import os; os.fork()",
        "import socket; socket.socket()",
        "print(42)",
    )
    assert found[:2] == ["42\n", "10002 ['LANG', 'TMPDIR']\n"]
    assert [text.splitlines()[-1].partition(":")[0] for text in found[2:6]] == [
        "PermissionError",
        "PermissionError",
        "PermissionError",
        "PermissionError",
    ]
    assert found[6] == "42\n"


def test_the_container_has_no_secret_no_volume_no_port_and_no_way_out(stack: ComposeStack) -> None:
    described: dict[str, Any] = stack.inspect("sandbox")
    assert [mount["Type"] for mount in described["Mounts"]] == []
    assert described["HostConfig"]["PortBindings"] in ({}, None)
    assert described["HostConfig"]["ReadonlyRootfs"]
    assert described["HostConfig"]["CapDrop"] == ["ALL"]
    names = [variable.partition("=")[0] for variable in described["Config"]["Env"]]
    assert [name for name in names if name.startswith(("GRISTMILL", "API", "HF", "WANDB"))] == []
    [network] = described["NetworkSettings"]["Networks"]
    out = "import socket; socket.create_connection(('198.51.100.1', 80), timeout=5); print('reached')"
    assert "reached" not in stack.compose("exec", "-T", "sandbox", "python", "-c", out, check=False)
    assert network.endswith("_sandbox")


@pytest.mark.long
def test_mixture_is_trained_across_kills_of_sandbox_and_environment(tmp_path: Path) -> None:
    steps, sources = 12, {"calculator", "programs", "sums"}
    override = tmp_path / "short.yaml"
    override.write_text(f'services: {{trainer: {{command: ["--training_steps", "{steps}"]}}}}\n')
    settings = {"CONFIG": "mixture", "COMPOSE_PROFILES": "sandbox"}
    with ComposeStack(tmp_path, "gristmill-mixture", settings, [override]) as stack:

        def trained() -> int:
            try:
                rows = api.metrics("mixture", "trainer")
            except ApiError as error:
                if error.code != "run_missing":
                    raise
                rows = []
            return rows[-1].step if rows else 0

        stack.up("redis", "api", "model", "sandbox", wait=True)
        stack.up()
        with SyncClient(stack.api_url) as api:
            for service, step in (("sandbox", 2), ("env", 4)):
                stack.wait_until(lambda step=step: trained() >= step, 600, f"step {step}")  # type: ignore[misc]
                os.kill(stack.pid(service), signal.SIGKILL)  # The restart policy brings it back.
            stack.wait_for_end(timeout=900)
            audit = api.audit("mixture")
        rows = stack.metrics("mixture", tmp_path)
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert all(row["source_rewards"].keys() == sources for row in rows)
    assert all(0 <= reward <= 1 for row in rows for reward in row["source_rewards"].values())
    assert len(set(audit.trained)) == len(audit.trained) == steps * 16
    assert (audit.ready, audit.leased, audit.dead, list(audit.dropped)) == ([], [], [], [])
