"""`docker compose run env --config gsm8k` as documented: it starts the whole stack and trains."""

from __future__ import annotations

from pathlib import Path

import httpx
from tests.support.compose import ComposeStack
from tests.support.hub_cache import make_gsm8k_cache
from tests.support.sampled_by import furthest_from_its_weights

from gristmill import Manifest, PolicyVersion, read_rollouts

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
    command: ["--training_steps", "{STEPS}", "--checkpoint_interval", "1", "--checkpoints_kept", "{STEPS}"]
"""
    )
    with ComposeStack(tmp_path, "gristmill-gsm8k", {"HF_HUB_OFFLINE": "1"}, [override]) as stack:
        said = stack.compose("run", "--rm", "env", "--config", "gsm8k", timeout=600)
        assert "run gsm8k is finished" in said
        assert "submit run=gsm8k" in said
        stack.wait_until(lambda: stack.exit_code("trainer") == 0, timeout=60, what="the trainer's end")
        rows = stack.metrics("gsm8k", tmp_path)
        assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
        assert httpx.get(f"{stack.model_url}/weight_info").json()["weight_version"] == f"1.{STEPS}"
        run, models = (
            stack.copy("trainer:/runs/gsm8k", tmp_path / "run"),
            stack.copy("model:/models", tmp_path / "models"),
        )
        rollouts = stack.copy("api:/runs/gsm8k/rollouts", tmp_path / "rollouts")

    fresh = [row for row in rows if row["staleness_mean"] == 0]
    assert max(row["rollout_logprob_diff_max"] for row in fresh) <= 1e-3

    # The environment generates one step ahead, so older weights than the trained ones sampled most tokens.
    def weights(version: PolicyVersion) -> Path:
        if version.step:
            return run / "checkpoints" / f"step-{version.step:06d}"
        return models / Path(Manifest.read(models).weights_path).name

    apart = furthest_from_its_weights(read_rollouts(rollouts), weights)
    assert len(apart) > 1, "the server was never updated while the environment generated"
    assert max(apart.values()) <= 1e-3, apart
