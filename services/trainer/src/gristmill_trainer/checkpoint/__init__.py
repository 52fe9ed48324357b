"""Checkpoints: durable before an ack of their groups, written atomically, and verified before use."""

from gristmill_trainer.checkpoint.contents import Checkpoint, Progress, Resumable
from gristmill_trainer.checkpoint.single import SingleProcess
from gristmill_trainer.checkpoint.store import CheckpointStore, Resumption, find_resumption

__all__ = [
    "Checkpoint",
    "CheckpointStore",
    "Progress",
    "Resumable",
    "Resumption",
    "SingleProcess",
    "find_resumption",
]
