"""A reward for similar meaning of completion and answer."""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated

from pydantic import Field, SecretStr

from gristmill_env.errors import RewardError
from gristmill_env.rewards.embeddings import Embedder, EmbeddingServer, LocalModel, Vectors, cosine_distances
from gristmill_env.rewards.registry import reward
from gristmill_env.settings import Url

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
                "cosine_scaled wants base_url, of an embeddings server, or local: true; set one of both",
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
