"""Publication of new weights to the running model server: one protocol, one file per transport."""

from gristmill_trainer.publish.publisher import (
    BackgroundPublisher,
    FilesystemPublisher,
    NonePublisher,
    Tensors,
    WeightPublisher,
)
from gristmill_trainer.publish.servers import ModelServer, ModelServers

__all__ = [
    "BackgroundPublisher",
    "FilesystemPublisher",
    "ModelServer",
    "ModelServers",
    "NonePublisher",
    "Tensors",
    "WeightPublisher",
]
