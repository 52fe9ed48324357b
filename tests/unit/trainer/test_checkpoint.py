"""Checkpoints are whole or not there, and resuming is bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gristmill_trainer.checkpoint import CheckpointStore
from gristmill_trainer.errors import CheckpointError
from gristmill_trainer.policy import Policy


def _adamw(policy: Policy) -> torch.optim.Optimizer:
    return torch.optim.AdamW(policy.model.parameters(), lr=1e-2)


def _step(policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    tokens = torch.arange(10)[None]
    optimizer.zero_grad()
    policy.model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()


def test_a_resumed_trainer_goes_on_bit_for_bit(policy: Policy, tmp_path: Path) -> None:
    optimizer = _adamw(policy)
    store = CheckpointStore(tmp_path, kept=2)
    for _ in range(3):
        _step(policy, optimizer)
    store.save(policy, optimizer, 3, ["g00000001", "g00000002"])
    _step(policy, optimizer)

    checkpoint = CheckpointStore(tmp_path, kept=2).latest()
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.covered) == (3, ["g00000001", "g00000002"])
    resumed = Policy(policy.source, "cpu", str(checkpoint.path))
    resumed_optimizer = _adamw(resumed)
    store.restore(checkpoint, resumed_optimizer)
    _step(resumed, resumed_optimizer)
    for name, tensor in policy.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name


def test_the_last_ones_are_kept(policy: Policy, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, kept=2)
    for step in (1, 2, 10):
        store.save(policy, _adamw(policy), step, [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000010"]


def test_a_checkpoint_torn_by_a_kill_is_cleared_away(policy: Policy, tmp_path: Path) -> None:
    CheckpointStore(tmp_path, kept=2).save(policy, _adamw(policy), 1, [])
    (tmp_path / ".step-000002.partial").mkdir()
    latest = CheckpointStore(tmp_path, kept=2).latest()
    assert latest is not None
    assert latest.step == 1
    assert not (tmp_path / ".step-000002.partial").exists()


def test_a_broken_checkpoint_is_named(policy: Policy, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, kept=2)
    (store.save(policy, _adamw(policy), 1, []).path / "trainer_state.json").write_text("{")
    with pytest.raises(CheckpointError, match="step-000001 is not readable"):
        store.latest()


def test_the_served_head_is_written_out_although_it_is_tied(policy: Policy) -> None:
    assert policy.model.get_output_embeddings().weight is policy.model.get_input_embeddings().weight
    tensors = policy.served_tensors()
    assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    assert tensors["lm_head.weight"].data_ptr() != tensors["model.embed_tokens.weight"].data_ptr()
