"""Text embeddings, for rewards that compare meanings."""

from gristmill_env.rewards.embeddings.embedder import Embedder, Vectors, cosine_distances
from gristmill_env.rewards.embeddings.local import LocalModel
from gristmill_env.rewards.embeddings.server import EmbeddingServer

__all__ = ["Embedder", "EmbeddingServer", "LocalModel", "Vectors", "cosine_distances"]
