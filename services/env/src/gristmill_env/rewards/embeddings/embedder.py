"""The interface of embedders, and the cosine distance of embeddings."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gristmill_env.errors import RewardError

Vectors = npt.NDArray[np.float64]


class Embedder(Hashable, Protocol):
    """Computes vectors of texts. Equal embedders compute equal vectors, so that vectors can be cached."""

    async def embed(self, texts: Sequence[str]) -> Vectors:
        """Returns f64[n, d], one row for each of n texts in their order. Raises RewardError."""


def cosine_distances(vectors: Vectors, other: Vectors) -> Vectors:
    """Returns f64[n]: 1 - cos of the angle between each row of `vectors` f64[n, d] and `other` f64[d]; 0 to 2.

    Raises RewardError for vectors of different lengths, or without a direction (all zeros, or not finite).
    """
    if vectors.shape[1] != len(other):
        raise RewardError(
            "embedding_sizes",
            f"embeddings of {vectors.shape[1]} and of {len(other)} numbers cannot be compared",
            sizes=[vectors.shape[1], len(other)],
        )
    norms = np.linalg.norm(vectors, axis=1) * np.linalg.norm(other)
    if not np.all(np.isfinite(norms) & (norms > 0)):
        raise RewardError(
            "embedding_without_direction",
            "an embedding has no direction (all zeros, or not finite); is this an embedding model?",
        )
    return np.asarray(1 - vectors @ other / norms, np.float64)
