"""How new weights reach the running model server: one protocol, one file a transport."""

from gristmill_trainer.publish.background import BackgroundPublisher
from gristmill_trainer.publish.base import Tensors, WeightPublisher
from gristmill_trainer.publish.filesystem import FilesystemPublisher
from gristmill_trainer.publish.none import NonePublisher
from gristmill_trainer.publish.server import ModelServer
from gristmill_trainer.publish.several import SeveralServers
from gristmill_trainer.publish.target import LoadTarget, OneServer

__all__ = [
    "BackgroundPublisher",
    "FilesystemPublisher",
    "LoadTarget",
    "ModelServer",
    "NonePublisher",
    "OneServer",
    "SeveralServers",
    "Tensors",
    "WeightPublisher",
]
