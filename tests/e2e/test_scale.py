"""`docker compose up --scale env=4`: four environments on one run split its rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support.compose import ComposeStack

STEPS, GROUPS = 6, 16


@pytest.mark.long
def test_four_environments_split_the_rows_of_one_run(tmp_path: Path) -> None:
    override = tmp_path / "short.yaml"
    override.write_text(f'services: {{trainer: {{command: ["--training_steps", "{STEPS}"]}}}}\n')
    with ComposeStack(tmp_path, "gristmill-scale", {"RUN_ID": "scale"}, [override]) as stack:
        stack.up(scale={"env": 4})
        stack.wait_for_end(timeout=600)
        submits = re.findall(r"submit run=scale group=\S+ env=(\S+) row=(\d+)", stack.logs("env"))
        rows = sorted(int(row) for _, row in submits)
        assert len(submits) >= STEPS * GROUPS
        assert rows == sorted(set(rows)), "a row was worked on twice"
        assert rows[: STEPS * GROUPS] == list(range(STEPS * GROUPS)), "a row was left out"
        assert len({env for env, _ in submits}) == 4, "one of the four did nothing"
