"""`docker compose run env --config gsm8k` as documented, with a hub cache in place of the hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from tests.support.compose import ComposeStack
from tests.support.hub_cache import make_gsm8k_cache

STEPS = 3


def gsm8k_stack(folder: Path, project: str, ports: Mapping[str, str]) -> ComposeStack:
    """Returns a stack whose environment has gsm8k's rows, and whose trainer trains for `STEPS` steps."""
    home = folder / "hub"
    make_gsm8k_cache(home, folder)
    override = folder / "offline.yaml"
    override.write_text(
        f"""
services:
  env:
    volumes: ["{home}:/hub"]
    environment: {{HF_HUB_OFFLINE: "1"}}
  trainer:
    command: ["--training_steps", "{STEPS}", "--checkpoint_interval", "1", "--checkpoints_kept", "{STEPS}"]
"""
    )
    return ComposeStack(folder, project, dict(ports), [override])


def train_gsm8k(stack: ComposeStack, folder: Path) -> list[dict[str, Any]]:
    """Trains with one command and checks that the run has ended well. Returns its metrics."""
    said = stack.compose("run", "--rm", "env", "--config", "gsm8k", timeout=600)
    assert "run gsm8k is finished" in said
    assert "submit run=gsm8k" in said
    stack.wait_until(lambda: stack.exit_code("trainer") == 0, timeout=60, what="the trainer's end")
    rows = stack.metrics("gsm8k", folder)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert httpx.get(f"{stack.model_url}/weight_info").json()["weight_version"] == f"1.{STEPS}"
    return rows
