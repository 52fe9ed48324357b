"""Publication of new weights to the running model server: one protocol, one file per transport."""

from gristmill_trainer.publish.background import BackgroundPublisher
from gristmill_trainer.publish.base import Tensors, WeightPublisher
from gristmill_trainer.publish.filesystem import FilesystemPublisher
from gristmill_trainer.publish.none import NonePublisher
from gristmill_trainer.publish.server import ModelServer
from gristmill_trainer.publish.servers import ModelServers

__all__ = [
    "BackgroundPublisher",
    "FilesystemPublisher",
    "ModelServer",
    "ModelServers",
    "NonePublisher",
    "Tensors",
    "WeightPublisher",
]
