"""Checkpoints: durable before anything is acked, whole or not there at all."""

from __future__ import annotations

import json
import logging
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from gristmill_trainer.errors import CheckpointError
from gristmill_trainer.policy import Policy

_LOG = logging.getLogger(__name__)
_STATE = "trainer_state.json"


@dataclass(frozen=True)
class Checkpoint:
    """What a folder checkpoints/step-000020/ holds besides the model's files and optimizer.pt."""

    step: int
    """Optimizer steps done."""
    covered: list[str]
    """Ids of the groups trained since the checkpoint before: the run's next trainer settles them."""
    path: Path


class CheckpointStore:
    """The checkpoints of one run, in `folder`; the last `kept` stay."""

    def __init__(self, folder: Path, kept: int) -> None:
        self._folder = folder
        self._kept = kept
        folder.mkdir(parents=True, exist_ok=True)
        for partial in folder.glob(".*.partial"):
            shutil.rmtree(partial)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint; None where there is none. Raises CheckpointError when it cannot be read."""
        folders = self._folders()
        if not folders:
            return None
        path = folders[-1]
        try:
            state = json.loads((path / _STATE).read_text())
            return Checkpoint(step=int(state["step"]), covered=list(state["covered"]), path=path)
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"checkpoint {path} is not readable ({error}); remove it to resume from the one before"
            ) from error

    def save(self, policy: Policy, optimizer: torch.optim.Optimizer, step: int, covered: list[str]) -> Checkpoint:
        """Write one, and return when it is on disk under its name."""
        path = self._folder / f"step-{step:06d}"
        partial = self._folder / f".step-{step:06d}.partial"
        partial.mkdir()
        policy.save(partial)
        torch.save({"optimizer": optimizer.state_dict(), "torch_rng": torch.get_rng_state()}, partial / "optimizer.pt")
        checkpoint = Checkpoint(step=step, covered=covered, path=path)
        state = {key: value for key, value in asdict(checkpoint).items() if key != "path"}
        (partial / _STATE).write_text(json.dumps(state))
        for file in partial.iterdir():
            _sync(file)
        _sync(partial)
        if path.exists():
            shutil.rmtree(path)
        partial.rename(path)
        _sync(self._folder)
        for old in self._folders()[: -self._kept]:
            shutil.rmtree(old)
        return checkpoint

    @staticmethod
    def restore(checkpoint: Checkpoint, optimizer: torch.optim.Optimizer) -> None:
        """Put optimizer and random numbers back as they were. (The model is loaded from the folder itself.)"""
        try:
            state = torch.load(checkpoint.path / "optimizer.pt", weights_only=True)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{checkpoint.path}/optimizer.pt is not readable: {error}") from error
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["torch_rng"])
        _LOG.info("resumed from %s", checkpoint.path)

    def _folders(self) -> list[Path]:
        return sorted(self._folder.glob("step-*"))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
