"""`docker compose run env --config gsm8k` as documented: it starts the whole stack and trains."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.gsm8k_stack import gsm8k_stack, train_gsm8k
from tests.support.sampled_by import furthest_from_its_weights

from gristmill import Manifest, PolicyVersion, read_rollouts


@pytest.mark.long
def test_one_command_trains_gsm8k(tmp_path: Path) -> None:
    with gsm8k_stack(tmp_path, "gristmill-gsm8k", {}) as stack:
        rows = train_gsm8k(stack, tmp_path)
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
