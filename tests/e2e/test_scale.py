"""`docker compose up --scale`: four environments split the rows of one run; two model servers share its requests."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import httpx
import pytest
from tests.support.compose import ComposeStack

from gristmill.internal.receipts import RECEIPTS_FILE, ReceiptState, read_receipts

STEPS, GROUPS, ENVIRONMENTS = 6, 16, 4
OVERRIDE = f"""
services:
  trainer: {{command: ["--training_steps", "{STEPS}"]}}
  env: {{command: ["--config", "quickstart", "--max_num_workers", "{GROUPS // ENVIRONMENTS}", "--steps_per_eval", "0"]}}
"""
"""The first permits cover one step. Each environment asks for as many permits as it has workers. So the four waiting
environments get the same number, and no environment can be too late."""


@pytest.mark.long
def test_four_environments_split_the_rows_of_one_run(tmp_path: Path) -> None:
    override = tmp_path / "short.yaml"
    override.write_text(OVERRIDE)
    with ComposeStack(tmp_path, "gristmill-scale", {"RUN_ID": "scale"}, [override]) as stack:
        stack.up("api", "model", wait=True)
        stack.compose("up", "--detach", "--no-deps", "--scale", f"env={ENVIRONMENTS}", "env")
        stack.wait_until(lambda: _asking(stack) == ENVIRONMENTS, 600, "four environments that ask for permits")
        stack.compose("up", "--detach", "--no-deps", "trainer")
        stack.wait_for_end(timeout=600)
        submits = re.findall(r"submit run=scale group=\S+ env=(\S+) row=(\d+)", stack.logs("env"))
        rows = sorted(int(row) for _, row in submits)
        assert len(submits) >= STEPS * GROUPS
        assert rows == sorted(set(rows)), "a row was worked on twice"
        assert rows[: STEPS * GROUPS] == list(range(STEPS * GROUPS)), "a row was left out"
        assert len({env for env, _ in submits}) == ENVIRONMENTS, "one of the four did nothing"


@pytest.mark.long
def test_two_model_servers_serve_one_run_and_one_of_them_may_die(tmp_path: Path) -> None:
    override = tmp_path / "long.yaml"
    override.write_text('services: {trainer: {command: ["--training_steps", "200"]}}\n')
    with ComposeStack(tmp_path, "gristmill-two-models", {"RUN_ID": "two"}, [override]) as stack:
        stack.up(scale={"model": 2})
        stack.wait_until(lambda: len(_proven(stack, tmp_path)) == 2, 900, "receipts of two model servers")
        assert httpx.get(f"{stack.model_url}/v1/models", timeout=30).status_code == 200
        dead, *_ = [str(item.ID) for item in stack.get_containers() if item.Service == "model"]
        subprocess.run(["docker", "stop", "--time", "0", dead], check=True)
        before = max(_proven(stack, tmp_path).values())
        stack.wait_until(
            lambda: max(_proven(stack, tmp_path).values()) >= before + 5, 300, "five steps with one of two servers"
        )
        assert httpx.get(f"{stack.model_url}/v1/models", timeout=30).status_code == 200
        subprocess.run(["docker", "start", dead], check=True)
        reached = max(_proven(stack, tmp_path).values())
        stack.wait_until(
            lambda: sum(step > reached for step in _proven(stack, tmp_path).values()) == 2, 600, "the server to return"
        )


def _proven(stack: ComposeStack, folder: Path) -> dict[str, int]:
    """Returns the newest step that each model server has proven to serve, by the server's address."""
    try:
        rows = read_receipts(stack.run_file("two", RECEIPTS_FILE, folder))
    except AssertionError:  # The trainer has not written the file yet.
        return {}
    return {row.server: row.step for row in rows if row.state is ReceiptState.OK}


def _asking(stack: ComposeStack) -> int:
    """Returns the number of environments that have begun to ask for permits. Each environment first returns the permits
    of a predecessor with the same name."""
    metrics = httpx.get(f"{stack.api_url}/metrics", timeout=30).text
    pattern = r'gristmill_api_requests_total\{method="POST",route="[^"]*/permits/abandon",status="200"\} (\d+)'
    return sum(int(count) for count in re.findall(pattern, metrics))
