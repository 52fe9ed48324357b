"""`docker compose run env --config gsm8k`, literally: it brings the whole stack and trains."""

from __future__ import annotations

from pathlib import Path

import httpx
from tests.support.compose import ComposeStack
from tests.support.hub_cache import make_gsm8k_cache

STEPS = 3


def test_one_command_trains_gsm8k(tmp_path: Path) -> None:
    home = tmp_path / "hub"
    make_gsm8k_cache(home, tmp_path)
    override = tmp_path / "offline.yaml"
    override.write_text(
        f"""
services:
  env:
    volumes: ["{home}:/hub"]
  trainer:
    command: ["--training_steps", "{STEPS}"]
"""
    )
    with ComposeStack(tmp_path, "gristmill-gsm8k", {"HF_HUB_OFFLINE": "1"}, [override]) as stack:
        said = stack.compose("run", "--rm", "env", "--config", "gsm8k", timeout=600)
        assert "run gsm8k is finished" in said
        assert "submit run=gsm8k" in said
        stack.wait_until(lambda: stack.exit_code("trainer") == 0, timeout=60, what="the trainer's end")
        rows = stack.metrics("gsm8k", tmp_path)
        assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
        assert max(row["rollout_logprob_diff_max"] for row in rows) <= 0.01
        assert httpx.get(f"{stack.model_url}/weight_info").json()["weight_version"] == f"1.{STEPS}"
