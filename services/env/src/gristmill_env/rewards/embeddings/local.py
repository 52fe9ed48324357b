"""Embeddings from a model in this process. Needs an optional extra with torch, which the images do not contain."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gristmill_env.errors import RewardError
from gristmill_env.rewards.embeddings.embedder import Vectors

_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True)
class LocalModel:
    """A sentence-transformers model, loaded at first use. The model truncates texts that are too long."""

    name: str
    """A hub id or a path."""

    def __post_init__(self) -> None:
        """Raises RewardError when the extra is missing. The model is loaded later, because loading takes long."""
        if importlib.util.find_spec("sentence_transformers") is None:
            raise RewardError(
                "package_missing",
                "local: true needs sentence-transformers, which is not installed: "
                'pip install "sentence-transformers>=3", or name an embeddings server with base_url',
                extra="embeddings",
            )

    async def embed(self, texts: Sequence[str]) -> Vectors:
        """Returns f64[n, d], computed on a thread. Raises RewardError when the model cannot be loaded."""
        return await asyncio.to_thread(self._encode, list(texts))

    def _encode(self, texts: list[str]) -> Vectors:
        with _ONE_AT_A_TIME:  # torch already uses all cores for one text
            return np.asarray(_load(self.name).encode(texts, show_progress_bar=False), np.float64)


@functools.cache
def _load(name: str) -> Any:
    from sentence_transformers import SentenceTransformer

    try:
        return SentenceTransformer(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise RewardError(
            "embedding_model_not_loaded",
            f"model_name '{name}' cannot be loaded as a sentence-transformers model: {error}",
            model=name,
        ) from error
