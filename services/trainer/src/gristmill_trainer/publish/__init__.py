"""How new weights reach the running model server: one protocol, one file a transport."""

from gristmill_trainer.publish.base import WeightPublisher
from gristmill_trainer.publish.filesystem import FilesystemPublisher
from gristmill_trainer.publish.none import NonePublisher
from gristmill_trainer.publish.server import ModelServer

__all__ = ["FilesystemPublisher", "ModelServer", "NonePublisher", "WeightPublisher"]
