"""An environment of several turns is trained: the reward rises, and both sides agree on the sampled tokens."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest
from tests.support.launcher import launch
from tests.support.stack import Vllm

from gristmill import TrajectoryGroup, read_rollouts
from gristmill.internal.lines import read_jsonl


@pytest.mark.long
def test_training_learns_a_game_of_several_turns(vllm: Vllm, tmp_path: Path) -> None:
    process, _ = launch(tmp_path, vllm, "--config", "guess")
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output
    rows = read_jsonl(tmp_path / "runs/guess/metrics.jsonl")
    rewards = [row["reward_mean"] for row in rows]
    # `tiny` knows most sums, so the reward begins near 0.77; training learns at least half of the rest to 1.
    first, last = fmean(rewards[:5]), fmean(rewards[-5:])
    assert first <= 0.85, rewards
    assert 1 - last <= 0.5 * (1 - first), rewards
    # Wrong tokens, a wrong mask or a turn rendered twice would show here.
    assert max(row["rollout_logprob_diff_max"] for row in rows) <= 0.01
    second = [group for group in read_rollouts(tmp_path / "runs/guess") if _two_replies(group)]
    assert second, "no attempt had a second try"


def _two_replies(group: TrajectoryGroup) -> bool:
    """Returns whether a sequence of the group has two trained stretches."""
    first = 0
    for length in group.lengths.tolist():
        mask = group.mask[first : first + length].astype(int)
        first += length
        if int((mask[1:] > mask[:-1]).sum()) > 1:
            return True
    return False
