"""Checkpoints: durable before an ack of their groups, written atomically, and verified before use."""

from gristmill_trainer.checkpoint.contents import Checkpoint, Progress
from gristmill_trainer.checkpoint.store import CheckpointStore, Resumption, find_resumption

__all__ = [
    "Checkpoint",
    "CheckpointStore",
    "Progress",
    "Resumption",
    "find_resumption",
]
