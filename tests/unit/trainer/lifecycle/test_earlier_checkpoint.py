"""A checkpoint that the trainer wrote at f365baa is still resumed from, to the same next weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.support.errors import raises
from tests.unit.trainer.lifecycle.conftest import LIMITS, SETTINGS, start_training, step_groups

from gristmill import PolicyVersion
from gristmill_trainer.checkpoint.store import CheckpointStore, find_resumption
from gristmill_trainer.data.samples import to_samples
from gristmill_trainer.errors import CheckpointError
from gristmill_trainer.policy import ModelSource

FILES = Path(__file__).parents[3] / "support" / "earlier_files"


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A copy of the checkpoint in a run's folder. The checkpoint is older than `Progress.creation`."""
    return Path(shutil.copytree(FILES / "step-000002", tmp_path / "checkpoints" / "step-000002"))


def test_training_continues_from_an_earlier_checkpoint(earlier: Path) -> None:
    store = CheckpointStore(earlier.parent, kept=2, creation="c2")
    resumption = find_resumption(store, str(earlier))
    assert resumption.checkpoint is not None
    progress = resumption.checkpoint.progress
    assert (progress.step, progress.version, progress.last_batch) == (2, PolicyVersion(1, 2), "1.2")
    assert progress.covered == ["g00000004", "g00000005"]
    assert (resumption.own, resumption.step, resumption.covered) == (False, 0, [])

    training = start_training(ModelSource(str(earlier), str(earlier), None, 512), str(earlier))
    store.restore(resumption.checkpoint, training.state)
    samples = to_samples(step_groups(3), LIMITS, SETTINGS).samples
    for sample in samples:
        sample.advantages[:] *= _noise(earlier)
    training.learner.step(samples, 3)  # It depends on the optimizer's state in the checkpoint.
    expected = load_file(FILES / "weights-after-step-3.safetensors")
    found = training.policy.served_tensors()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if name.endswith("k_proj.bias"):
            # Softmax removes the bias of the keys: its gradient is rounding, which depends on the processor, and AdamW
            # scales that up to a whole step.
            continue
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


def _noise(earlier: Path) -> float:
    """The factor of the advantages at f365baa: drawn from the generators whose states were in checkpoints then."""
    states = torch.load(earlier / "random.pt", weights_only=True)
    numbers = states["numpy"]
    numpy = np.random.RandomState()
    numpy.set_state(("MT19937", numbers["key"].numpy().astype(np.uint32), numbers["pos"], 0, 0.0))
    draw = torch.rand((), generator=torch.Generator().set_state(states["torch"]))
    return 1 + 0.01 * (float(draw) + numpy.random_sample())


def test_checkpoint_of_an_earlier_creation_is_not_resumed(earlier: Path) -> None:
    with raises(CheckpointError, "checkpoint_of_earlier_run", path=earlier):
        find_resumption(CheckpointStore(earlier.parent, kept=2, creation="c2"), "auto")
