"""Does the completion mean what the answer means?"""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated

from pydantic import Field, SecretStr

from gristmill_env.errors import RewardError
from gristmill_env.rewards.embeddings import Embedder, EmbeddingServer, LocalModel, Vectors, cosine_distances
from gristmill_env.rewards.registry import reward
from gristmill_env.settings.servers import Url

_REMEMBERED = 1024


@reward("cosine_scaled")
async def cosine_scaled(
    completion: str,
    answer: str,
    *,
    base_url: Url | None = None,
    model_name: str = "sentence-transformers/all-MiniLM-L6-v2",
    api_key: SecretStr | None = None,
    local: bool = False,
    max_characters: Annotated[int, Field(gt=0)] | None = None,
    scale_factor: Annotated[float, Field(gt=0)] = 1.0,
    min_reward: float = -1.0,
    max_reward: float = 1.0,
) -> float | None:
    """1 - `scale_factor` * cosine distance of the embeddings of completion and answer, cut to its bounds.

    The distance is 0 for the same direction and 2 for the opposite one; bounds given the wrong way round
    are swapped. A completion without text has `min_reward`; a row whose answer has none gets no score.

    Options: `base_url` of a server that has POST /v1/embeddings, `model_name` there and `api_key` for it
    (write ${VAR}); or `local` for the model in this process (the extra gristmill-env[embeddings]).
    `max_characters` cuts longer texts, of which servers refuse what their model cannot take.

    Raises RewardError when there is no server or extra, or it gives no embeddings.
    """
    low, high = sorted((min_reward, max_reward))
    if not answer.strip():
        return None
    if not completion.strip():
        return low
    if base_url is not None and not local:
        embedder: Embedder = EmbeddingServer(base_url, model_name, api_key)
    elif local and base_url is None:
        embedder = LocalModel(model_name)
    else:
        raise RewardError("cosine_scaled wants base_url, of an embeddings server, or local: true; set one of the two")
    distance = await _distance(embedder, completion[:max_characters], answer[:max_characters])
    return max(low, min(high, 1 - scale_factor * distance))


_answers: OrderedDict[tuple[Embedder, str], Vectors] = OrderedDict()
"""Vectors of the answers met last: a group has one answer, and the next epoch has it again."""


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
