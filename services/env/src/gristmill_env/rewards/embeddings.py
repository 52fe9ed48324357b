"""The reward `cosine_scaled`, for similar meaning of completion and answer, and the sources of embeddings."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import ssl
import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeAlias

import msgspec
from pydantic import Field, SecretStr

from gristmill.backoff import Backoff
from gristmill.redaction import redact_text
from gristmill_env.errors import RewardError
from gristmill_env.rewards.registry import reward
from gristmill_env.settings.run import Url

if TYPE_CHECKING:
    # Imported where they are used: every process with rewards imports this module, and few use it.
    import httpx
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
        self._embedder: Embedder = (
            LocalModel(model_name) if base_url is None else EmbeddingServer(base_url, model_name, api_key)
        )
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


_answers: OrderedDict[tuple[Embedder, str], Vectors] = OrderedDict()
"""Vectors of the most recent answers. All completions of a group share one answer, and the next epoch repeats it."""


async def _distance(embedder: Embedder, completion: str, answer: str) -> float:
    key = (embedder, answer)
    known = _answers.pop(key, None)
    if known is None:
        vector, known = await embedder.embed([completion, answer])
    else:
        (vector,) = await embedder.embed([completion])
    _answers[key] = known
    while len(_answers) > _REMEMBERED:
        _answers.popitem(last=False)
    return float(cosine_distances(vector[None], known)[0])


Vectors: TypeAlias = "npt.NDArray[np.float64]"


class Embedder(Hashable, Protocol):
    """Computes vectors of texts. Equal embedders compute equal vectors, so that vectors can be cached."""

    async def embed(self, texts: Sequence[str]) -> Vectors:
        """Returns f64[n, d], one row for each of n texts in their order. Raises RewardError."""


def cosine_distances(vectors: Vectors, other: Vectors) -> Vectors:
    """Returns f64[n]: 1 - cos of the angle between each row of `vectors` f64[n, d] and `other` f64[d]; 0 to 2.

    Raises RewardError for vectors of different lengths, or without a direction (all zeros, or not finite).
    """
    import numpy as np

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


_TIMEOUT = 60.0
_CALLS = 4
"""Requests until the server counts as away."""


class _Embedding(msgspec.Struct):
    index: int
    embedding: list[float]


class _Embeddings(msgspec.Struct):
    data: list[_Embedding]


@dataclass(frozen=True)
class EmbeddingServer:
    """An embedding model on a server. Not tied to an event loop."""

    base_url: str
    """The server's address, with or without /v1."""
    model: str
    api_key: SecretStr | None = None

    async def embed(self, texts: Sequence[str]) -> Vectors:
        """Returns f64[n, d], with one request. Raises RewardError when the server refuses it or fails four times.

        The error of a server that fails may pass, so the run waits for the server."""
        import numpy as np

        from gristmill import connections

        request: dict[str, object] = {"model": self.model, "input": list(texts), "encoding_format": "float"}
        headers = {"Authorization": f"Bearer {self.api_key.get_secret_value()}"} if self.api_key else {}
        async with connections.async_client(self._url, headers=headers, timeout=_TIMEOUT, verify=_tls()) as http:
            answer = await self._ask(http, request)
        try:
            data = msgspec.json.decode(answer.content, type=_Embeddings).data
        except msgspec.DecodeError as error:
            raise RewardError(
                "embeddings_invalid", f"{self._named} does not answer as OpenAI's does: {error}", url=self._shown
            ) from error
        rows = {item.index: item.embedding for item in data}
        if sorted(rows) != list(range(len(texts))) or len({len(row) for row in rows.values()}) != 1:
            raise RewardError(
                "embeddings_incomplete",
                f"{self._named} was sent {len(texts)} texts and did not return a vector for each",
                url=self._shown,
                texts=len(texts),
            )
        return np.array([rows[index] for index in range(len(texts))], np.float64)

    @property
    def _url(self) -> str:
        return self.base_url.rstrip("/").removesuffix("/v1") + "/v1/embeddings"

    @property
    def _named(self) -> str:
        return f"the embeddings server at {self._shown}"

    @property
    def _shown(self) -> str:
        """The address for messages, without a password."""
        return redact_text(self._url)

    async def _ask(self, http: httpx.AsyncClient, request: dict[str, object]) -> httpx.Response:  # noqa: TID251
        import httpx

        problem, backoff = "", Backoff(0.25, 1.0)
        for number in range(_CALLS):
            if number:
                await asyncio.sleep(backoff.next())
            try:
                answer = await http.post(self._url, json=request)
                if answer.is_success:
                    return answer
                problem = f"HTTP {answer.status_code}: {answer.text[:300]}"
                if answer.status_code < 500 and answer.status_code not in (408, 429):
                    raise RewardError(
                        "embeddings_refused",
                        f"{self._named} refuses: {problem}{_REMEDIES.get(answer.status_code, '')}",
                        url=self._shown,
                        status=answer.status_code,
                    )
            except httpx.TransportError as error:
                problem = str(error) or type(error).__name__
        away = RewardError(
            "embeddings_unreachable",
            f"{self._named} does not answer ({problem}); is it running, and is base_url its address?",
            url=self._shown,
        )
        away.may_pass = True
        raise away


_TOO_LONG = "; where a text is too long for the model, set max_characters"
_REMEDIES = {
    400: _TOO_LONG,
    413: _TOO_LONG,
    422: _TOO_LONG,
    401: "; set api_key",
    403: "; set api_key",
    404: "; are base_url and model_name right?",
}


@functools.cache
def _tls() -> ssl.SSLContext:
    """Creates the context once, because reading all certificate authorities takes longer than a request."""
    import httpx

    return httpx.create_ssl_context()


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
