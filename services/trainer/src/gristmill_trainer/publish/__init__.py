"""Publication of new weights to the running model servers."""

from gristmill_trainer.publish.publisher import (
    FilesystemTransport,
    NoTransport,
    Publisher,
    Tensors,
    WeightTransport,
    claim_publishing,
)
from gristmill_trainer.publish.servers import ModelServer, ModelServers, ServerList

__all__ = [
    "FilesystemTransport",
    "ModelServer",
    "ModelServers",
    "NoTransport",
    "Publisher",
    "ServerList",
    "Tensors",
    "WeightTransport",
    "claim_publishing",
]
