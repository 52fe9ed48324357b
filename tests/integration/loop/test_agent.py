"""An agent in a process of its own is trained through the gateway, with the openai client and a real vLLM."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import yaml
from tests.support.launcher import launch
from tests.support.stack import ROOT, Vllm

from gristmill import TrajectoryGroup, read_rollouts
from gristmill.metrics import read_jsonl

BRANCHING = """
from openai import AsyncOpenAI


async def run(task, endpoint):
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.key)

    async def say(messages):
        answer = await client.chat.completions.create(model=endpoint.model, messages=messages)
        return [*messages, {"role": "assistant", "content": answer.choices[0].message.content}]

    first = await say(task.messages)
    await say([*first, {"role": "user", "content": "Again?"}])
    last = await say([*first, {"role": "user", "content": "Sure?"}])
    last = await say([{"role": "user", "content": "Summary. " + task.prompt}])
    right = task.answer.rpartition("####")[2].strip()
    return float(f"<answer>{right}</answer>" in last[-1]["content"])
"""


def test_branches_of_an_agents_rollouts_are_trained_as_they_were_sampled(vllm: Vllm, tmp_path: Path) -> None:
    settings = yaml.safe_load((ROOT / "configs" / "agent.yaml").read_text())
    dataset = settings["dataset"]
    dataset["dataset_path"] = str(ROOT / "configs" / dataset["dataset_path"])
    settings |= {"agent": "branching.py:run", "steps_per_eval": 0, "group_size": 4}
    settings["trainer"] |= {"training_steps": 3, "batch_size": 16}
    (tmp_path / "branching.py").write_text(BRANCHING)
    (tmp_path / "branching.yaml").write_text(yaml.safe_dump(settings))
    process, _ = launch(tmp_path, vllm, "--config", str(tmp_path / "branching.yaml"))
    output, _ = process.communicate(timeout=420)
    assert process.returncode == 0, output
    rows = read_jsonl(tmp_path / "runs/branching/metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    # A token that was tokenized again, or a wrong mask, would show here.
    assert max(row["rollout_logprob_diff_max"] for row in rows) <= 0.01
    groups = list(read_rollouts(tmp_path / "runs/branching"))
    assert len(groups) == 3 * 8
    for group in groups:
        assert group.rollout_of.tolist() == [rollout for rollout in range(4) for _ in range(3)]
        again, sure, summary = (_trained(group, branch) for branch in range(3))
        assert (again, sure, summary) == (2, 1, 1), "the shared first reply is trained in one branch"
        assert np.unique(group.rewards[:3]).size == 1


@pytest.mark.long
def test_tiny_learns_through_the_gateway(vllm: Vllm, tmp_path: Path) -> None:
    process, _ = launch(tmp_path, vllm, "--config", "agent")
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output
    rewards = [row["reward_mean"] for row in read_jsonl(tmp_path / "runs/agent/metrics.jsonl")]
    assert rewards[0] <= 0.4, rewards
    assert fmean(rewards[-5:]) >= 0.8, rewards


def _trained(group: TrajectoryGroup, sequence: int) -> int:
    """Returns the number of trained stretches of a sequence."""
    start = int(group.lengths[:sequence].sum())
    mask = group.mask[start : start + int(group.lengths[sequence])].astype(int)
    return int((np.diff(mask, prepend=0) == 1).sum())
