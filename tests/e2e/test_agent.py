"""`docker compose run agent`: an agent in a separate container plays the rollouts of a training in the stack."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from tests.support.compose import ComposeStack
from tests.support.ports import free_port

from gristmill_cli.local.secret_files import FOLDER
from secure import main

STEPS = 2


@pytest.mark.long
def test_an_agent_in_a_container_plays_the_rollouts(tmp_path: Path) -> None:
    override = tmp_path / "short.yaml"
    override.write_text(f'services: {{trainer: {{command: ["--training_steps", "{STEPS}"]}}}}\n')
    port = str(free_port())
    main([], tmp_path)
    folder = tmp_path / FOLDER
    secured = {"API_AUTH": "token", "SECRETS_DIR": str(folder), "SECRETS_GID": str(folder.stat().st_gid)}
    settings = {"CONFIG": "agent_elsewhere", "GATEWAY_PORT": port, **secured}
    with ComposeStack(tmp_path, "gristmill-agent", settings, [override]) as stack:
        stack.compose("run", "--rm", "--detach", "agent", timeout=900)
        stack.wait_until(lambda: _answers(port), 300, "the gateway, at its port of this machine")
        assert httpx.post(f"http://127.0.0.1:{port}/agent/task").status_code == 401
        stack.wait_for_end(timeout=600)
        rows = stack.metrics("agent_elsewhere", tmp_path)
        assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
        assert max(row["rollout_logprob_diff_max"] for row in rows) <= 0.01


def _answers(port: str) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
