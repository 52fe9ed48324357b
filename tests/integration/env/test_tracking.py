"""The W&B entries of `serve` for a real run, offline, match the trained and the dropped groups."""

from __future__ import annotations

import math
import re
import time

import httpx
import numpy as np
import pytest
from tests.integration.env.conftest import Environments, HandTrainer
from tests.support.ports import free_port
from tests.support.wandb_file import read_wandb

from gristmill import Manifest
from gristmill_env.rollouts.prompts import PromptBuilder, load_tokenizer

FLAGS = "--use_wandb --wandb_name sums-1 --min_items_sent_before_logging 3 --num_rollouts_per_group_for_logging -1"


@pytest.fixture(autouse=True)
def _no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", "/nowhere")


def test_wandb_entries_match_the_trained_groups(environments: Environments, trainer: HandTrainer) -> None:
    env = environments.here(trainer.url, *FLAGS.split(), "--no-shuffle_dataset")
    # One group per step: an entry covers the scored prompts, which are then the submitted prompts.
    trainer.groups_per_step = 1
    trainer.trainer |= {"batch_size": 2, "training_steps": 8}
    trainer.take()
    groups = trainer.train(until=8)
    trainer.api.finish("sums", trainer.incarnation)
    env.join()
    run = read_wandb(environments.folder / "runs" / "sums")

    assert (run.name, run.group) == ("sums-1", "sums")
    assert run.config["dataset"]["prompt_field"] == "question"
    assert [entry["train/items_sent_to_api"] for entry in run.history] == [3, 3, 2]
    assert run.history[-1]["groups/submitted"] == len(groups) == 8
    assert [entry["policy_step"] for entry in run.history] == sorted(entry["policy_step"] for entry in run.history)

    # Nothing was dropped: the entries together are the groups that the trainer received.
    rewards = np.concatenate([group.rewards for group in groups])
    lengths = [int(count) for group in groups for count in _sampled(group.lengths, group.mask)]
    weights = [6, 6, 4]
    means = [entry["train/rewards_mean"] for entry in run.history]
    assert math.fsum(map(math.prod, zip(means, weights, strict=True))) / 16 == pytest.approx(rewards.mean())
    long = [entry["train/completion_lengths"] for entry in run.history]
    assert math.fsum(map(math.prod, zip(long, weights, strict=True))) / 16 == pytest.approx(np.mean(lengths))
    assert max(entry["train/completion_lengths_max"] for entry in run.history) == max(lengths)
    parts = [part for group in groups for part in group.reward_parts["length"] if part is not None]
    assert min(entry["reward/length/min"] for entry in run.history) == pytest.approx(min(parts))

    prompts = PromptBuilder(load_tokenizer(Manifest.read(environments.vllm.models_dir).tokenizer_path))
    rows = [row for entry in run.history for row in run.table(entry, "train/rollouts")[1:]]
    by_id = {group.group_id: group for group in groups}
    assert len(rows) == 16
    for text, score, group_id, version in rows:
        group = by_id[group_id]
        asked = prompts.build(f"What is {group.row} + 1?").text
        assert text.startswith(asked)
        ends = group.lengths.cumsum()
        said = [
            (prompts.decode(group.tokens[start:end][group.mask[start:end]].tolist()), float(reward))
            for start, end, reward in zip(ends - group.lengths, ends, group.rewards, strict=True)
        ]
        assert (text.removeprefix(asked), score) in said
        assert version == str(group.oldest_version)


def test_wandb_and_metrics_count_dropped_groups(environments: Environments, trainer: HandTrainer) -> None:
    # Completions of one token: all score 1/128, and no group gets through.
    port = free_port()
    flags = "--use_wandb --ensure_scores_are_not_same --max_tokens 1 --reward_functions length --metrics_address"
    env = environments.here(trainer.url, *flags.split(), str(port))
    trainer.take()
    while trainer.api.status("sums").dropped.get("same_scores", 0) < 40:
        time.sleep(0.1)
    page = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    lines = re.findall(r'^gristmill_env_groups_total{outcome="(\w+)",run="sums"} (\S+)$', page, re.MULTILINE)
    rows = {outcome: float(count) for outcome, count in lines}
    # The API may know of a drop shortly before its environment.
    assert 40 - 16 <= rows["same_scores"] <= trainer.api.status("sums").dropped["same_scores"]
    assert rows["submitted"] == 0
    trainer.api.finish("sums", trainer.incarnation)
    env.join()
    history = read_wandb(environments.folder / "runs" / "sums").history
    assert len(history) >= 2
    assert {entry["train/rewards_mean"] for entry in history} == {1 / 128}
    # The one token may sometimes be the end token.
    assert all(0.8 <= entry["train/truncation_rate"] <= 1.0 for entry in history)


def _sampled(lengths: np.ndarray, mask: np.ndarray) -> list[int]:
    ends = lengths.cumsum()
    return [int(mask[start:end].sum()) for start, end in zip(ends - lengths, ends, strict=True)]
