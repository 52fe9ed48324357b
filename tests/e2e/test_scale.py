"""`docker compose up --scale env=4`: four environments on one run split its rows."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from tests.support.compose import ComposeStack

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


def _asking(stack: ComposeStack) -> int:
    """Returns the number of environments that have begun to ask for permits. Each environment first returns the permits
    of a predecessor with the same name."""
    metrics = httpx.get(f"{stack.api_url}/metrics", timeout=30).text
    pattern = r'gristmill_api_requests_total\{method="POST",route="[^"]*/permits/abandon",status="200"\} (\d+)'
    return sum(int(count) for count in re.findall(pattern, metrics))
