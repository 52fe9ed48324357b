"""What makes vectors of texts, and how far apart these are."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gristmill_env.errors import RewardError

Vectors = npt.NDArray[np.float64]


class Embedder(Hashable, Protocol):
    """Makes a vector of a text. Equal embedders make equal vectors, so that these can be remembered."""

    async def embed(self, texts: Sequence[str]) -> Vectors:
        """f64[n, d], a row for each of n texts in their order. Raises RewardError."""


def cosine_distances(vectors: Vectors, other: Vectors) -> Vectors:
    """f64[n]: 1 - cos of the angle between each row of `vectors` f64[n, d] and `other` f64[d]; 0 to 2.

    Raises RewardError for vectors of other lengths, or of no direction (all zeros, or not finite).
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
