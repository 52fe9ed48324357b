"""Embeddings from any server that supports OpenAI's POST /v1/embeddings: vLLM, TEI, Ollama, OpenAI."""

from __future__ import annotations

import asyncio
import functools
import random
import ssl
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import msgspec
import numpy as np
from pydantic import SecretStr

from gristmill.redaction import redact_text
from gristmill_env.errors import RewardError
from gristmill_env.rewards.embeddings.embedder import Vectors

_TIMEOUT = 60.0
_PAUSES = (0.25, 0.5, 1.0)
"""Seconds before each retry, with jitter of 0.5 to 1.5 times."""


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
        """Returns f64[n, d], with one request. Raises RewardError when the server refuses it or fails four times."""
        request: dict[str, object] = {"model": self.model, "input": list(texts), "encoding_format": "float"}
        headers = {"Authorization": f"Bearer {self.api_key.get_secret_value()}"} if self.api_key else {}
        async with httpx.AsyncClient(headers=headers, timeout=_TIMEOUT, verify=_tls()) as http:
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

    async def _ask(self, http: httpx.AsyncClient, request: dict[str, object]) -> httpx.Response:
        problem = ""
        for pause in (*_PAUSES, None):
            try:
                answer = await http.post(self._url, json=request)
                if answer.is_success:
                    return answer
                problem = f"HTTP {answer.status_code}: {answer.text[:300]}"
                if answer.status_code < 500 and answer.status_code != 429:
                    raise RewardError(
                        "embeddings_refused",
                        f"{self._named} refuses: {problem}{_REMEDIES.get(answer.status_code, '')}",
                        url=self._shown,
                        status=answer.status_code,
                    )
            except httpx.TransportError as error:
                problem = str(error) or type(error).__name__
            if pause is not None:
                await asyncio.sleep(pause * random.uniform(0.5, 1.5))
        raise RewardError(
            "embeddings_unreachable",
            f"{self._named} does not answer ({problem}); is it running, and is base_url its address?",
            url=self._shown,
        )


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
    return httpx.create_ssl_context()
