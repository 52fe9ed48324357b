"""Checkpoints: durable before an ack of their groups, written atomically, and verified before use."""

from gristmill_trainer.checkpoint.background import BackgroundSave
from gristmill_trainer.checkpoint.contents import Checkpoint, Progress
from gristmill_trainer.checkpoint.store import CheckpointStore, Resumption, find_resumption

__all__ = [
    "BackgroundSave",
    "Checkpoint",
    "CheckpointStore",
    "Progress",
    "Resumption",
    "find_resumption",
]
