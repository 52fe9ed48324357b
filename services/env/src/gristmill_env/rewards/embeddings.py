"""The reward `cosine_scaled`, for similar meaning of completion and answer, and the sources of embeddings."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
from pydantic import Field, SecretStr

from gristmill.internal.redaction import redact_text
from gristmill_env.errors import RewardError
from gristmill_env.rewards.registry import reward
from gristmill_env.rewards.remote import RewardServer
from gristmill_env.settings.servers import Url

if TYPE_CHECKING:
    # Imported at the first use: every process with rewards imports this module, and few use it.
    import numpy as np
    import numpy.typing as npt

_REMEMBERED = 1024


@reward("cosine_scaled")
class CosineScaled:
    """1 - `scale_factor` * cosine distance of the embeddings of completion and answer, cut to its bounds.

    The distance is 0 for the same direction and 2 for the opposite one; bounds given the wrong way round
    are swapped. A completion without text has `min_reward`; a row whose answer has none gets no score.

    Options: `base_url` of a server that has POST /v1/embeddings, `model_name` there and `api_key` for it
    (write ${VAR}); or `local` for the model in this process (the extra gristmill-env[embeddings]).
    `max_characters` cuts longer texts, of which servers refuse what their model cannot take.
    """

    def __init__(
        self,
        *,
        base_url: Url | None = None,
        model_name: str = "sentence-transformers/all-MiniLM-L6-v2",
        api_key: SecretStr | None = None,
        local: bool = False,
        max_characters: Annotated[int, Field(gt=0)] | None = None,
        scale_factor: Annotated[float, Field(gt=0)] = 1.0,
        min_reward: float = -1.0,
        max_reward: float = 1.0,
    ) -> None:
        """Raises RewardError unless exactly one of `base_url` and `local` is set, or if the extra is missing."""
        if local == (base_url is not None):
            raise RewardError(
                "embeddings_source",
                "cosine_scaled needs base_url, of an embeddings server, or local: true; set one of them",
            )
        self._embedder: EmbeddingServer | LocalModel
        if base_url is None:
            self._embedder = LocalModel(model_name)
        else:
            server = RewardServer(base_url, api_key, "embeddings server", remedies=_REMEDIES)
            self._embedder = EmbeddingServer(server, model_name)
        self._most = max_characters
        self._scale = scale_factor
        self._low, self._high = sorted((min_reward, max_reward))

    async def __call__(self, completion: str, answer: str) -> float | None:
        """Scores one completion. Raises RewardError when the embedder fails."""
        if not answer.strip():
            return None
        if not completion.strip():
            return self._low
        distance = await _distance(self._embedder, completion[: self._most], answer[: self._most])
        return max(self._low, min(self._high, 1 - self._scale * distance))


_answers: OrderedDict[tuple[EmbeddingServer | LocalModel, str], Vectors] = OrderedDict()
"""Vectors of the most recent answers. All completions of a group share one answer, and the next epoch repeats it."""


async def _distance(embedder: EmbeddingServer | LocalModel, completion: str, answer: str) -> float:
    key = (embedder, answer)
    known = _answers.get(key)
    if known is None:
        vector, known = await embedder.embed([completion, answer])
    else:
        (vector,) = await embedder.embed([completion])
    _answers[key] = known
    _answers.move_to_end(key)
    while len(_answers) > _REMEMBERED:
        _answers.popitem(last=False)
    return cosine_distance(vector, known)


Vectors: TypeAlias = "npt.NDArray[np.float64]"


def cosine_distance(vector: Vectors, other: Vectors) -> float:
    """Returns 1 - cos of the angle between two vectors, f64[d]; 0 to 2.

    Raises RewardError for vectors of different lengths, or without a direction (all zeros, or not finite).
    """
    import numpy as np

    if len(vector) != len(other):
        raise RewardError(
            "embedding_sizes",
            f"embeddings of {len(vector)} and of {len(other)} numbers cannot be compared",
            sizes=[len(vector), len(other)],
        )
    norms = np.linalg.norm(vector) * np.linalg.norm(other)
    if not 0 < norms < np.inf:
        raise RewardError(
            "embedding_without_direction",
            "an embedding has no direction (all zeros, or not finite); is this an embedding model?",
        )
    return float(1 - vector @ other / norms)


class _Embedding(msgspec.Struct):
    index: int
    embedding: list[float]


class _Embeddings(msgspec.Struct):
    data: list[_Embedding]


@dataclass(frozen=True)
class EmbeddingServer:
    """An embedding model on a server. Equal servers compute equal vectors, so that vectors can be cached."""

    server: RewardServer
    model: str

    async def embed(self, texts: Sequence[str]) -> Vectors:
        """Returns f64[n, d], a row per text. Raises RewardError as RewardServer.post does, and for a wrong answer."""
        import numpy as np

        request = {"model": self.model, "input": list(texts), "encoding_format": "float"}
        answer = await self.server.post("embeddings", request)
        named = f"the embeddings server at {redact_text(self.server.base_url)}"
        try:
            data = msgspec.json.decode(answer, type=_Embeddings).data
        except ValueError as error:
            raise RewardError("embeddings_invalid", f"{named} does not answer as OpenAI's does: {error}") from error
        rows = {item.index: item.embedding for item in data}
        if sorted(rows) != list(range(len(texts))) or len({len(row) for row in rows.values()}) != 1:
            raise RewardError(
                "embeddings_incomplete",
                f"{named} was sent {len(texts)} texts and did not return a vector for each",
                texts=len(texts),
            )
        return np.array([rows[index] for index in range(len(texts))], np.float64)


_TOO_LONG = "; where a text is too long for the model, set max_characters"
_REMEDIES = {400: _TOO_LONG, 413: _TOO_LONG, 422: _TOO_LONG}


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
        import numpy as np

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
