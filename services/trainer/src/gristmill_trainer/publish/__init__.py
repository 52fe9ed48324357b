"""Publication of new weights to the running model servers."""

from gristmill_trainer.publish.pool import ModelServers
from gristmill_trainer.publish.publisher import (
    FilesystemTransport,
    NoTransport,
    Publisher,
    Tensors,
    claim_publishing,
)
from gristmill_trainer.publish.servers import ModelServer, ServerList

__all__ = [
    "FilesystemTransport",
    "ModelServer",
    "ModelServers",
    "NoTransport",
    "Publisher",
    "ServerList",
    "Tensors",
    "claim_publishing",
]
