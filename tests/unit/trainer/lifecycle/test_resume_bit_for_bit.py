"""Killed after its checkpoint and started again on the same groups, a trainer writes the same next checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tests.unit.trainer.lifecycle.conftest import progress, start_training

from gristmill_trainer.checkpoint.store import CheckpointStore, find_resumption
from gristmill_trainer.policy import ModelSource

_PROGRAM = """
import os, signal, sys
from pathlib import Path
import numpy, random, torch
from tests.unit.trainer.lifecycle.test_resume_bit_for_bit import run
torch.manual_seed(1); numpy.random.seed(1); random.seed(1)
run(Path(sys.argv[1]), sys.argv[2], last=int(sys.argv[3]))
if sys.argv[4] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def run(folder: Path, model: str, last: int) -> None:
    """Trains up to step `last` from the newest checkpoint, and writes a checkpoint after every second step."""
    store = CheckpointStore(folder, kept=5)
    resumption = find_resumption(store, "auto")
    training = start_training(ModelSource(model, model, None, 512), resumption.weights)
    if resumption.checkpoint is not None:
        store.restore(resumption.checkpoint, training.state)
    for step in range(resumption.step + 1, last + 1):
        training.step(step)
        if step % 2 == 0:
            store.save(training.state, progress(step))


def _process(*arguments: str) -> int:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run([sys.executable, "-c", _PROGRAM, *arguments], env=environ, check=False).returncode


@pytest.mark.long
def test_killed_and_resumed_training_gives_the_same_bytes(model_dir: Path, tmp_path: Path) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert _process(str(straight), str(model_dir), "4", "end") == 0
    assert _process(str(killed), str(model_dir), "3", "kill") == -signal.SIGKILL
    assert sorted(path.name for path in killed.iterdir()) == ["step-000002"]
    assert _process(str(killed), str(model_dir), "4", "end") == 0

    def hashes(folder: Path) -> dict[str, object]:
        files: dict[str, object] = msgspec.json.decode((folder / "step-000004" / "manifest.json").read_bytes())["files"]
        return files

    assert {"model.safetensors", "optimizer.pt", "trainer_state.json"} <= hashes(straight).keys()
    assert hashes(killed) == hashes(straight)
