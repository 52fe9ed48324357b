"""HTTP to a server that may be away for a while."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

import httpx

from gristmill_env.errors import InferenceError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 5.0


class TryAgainError(Exception):
    """Raised by a reader of answers: this one is of no use, the next may be."""


class PatientHttp:
    """Asks a model server until it answers.

    No connection, a time-out, 429, 5xx and a `TryAgainError` of the reader are tried again, with growing
    pauses, for `patience` seconds. Any other refusal is the reader's to judge.
    """

    def __init__(self, url: str, *, headers: dict[str, str], timeout: float, patience: float) -> None:
        """`timeout`: seconds one request may take."""
        self._url = url
        self._patience = patience
        self._away = False
        # The environment's workers bound the requests; the pool's own bound would only queue them out of sight.
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout, limits=limits)

    async def ask(
        self,
        method: str,
        path: str,
        read: Callable[[httpx.Response], T],
        *,
        json: Any = None,
        patience: float | None = None,
    ) -> T:
        """What `read` makes of the answer. Raises InferenceError when there is none in time."""
        patience = self._patience if patience is None else patience
        started, pause = time.monotonic(), _FIRST_PAUSE
        while True:
            try:
                answer = await self._client.request(method, path, json=json)
                if answer.status_code < 500 and answer.status_code != 429:
                    found = read(answer)
                    self._say(away=False)
                    return found
                problem = f"HTTP {answer.status_code}: {answer.text[:200]}"
            except (httpx.TransportError, TryAgainError) as error:
                problem = str(error) or type(error).__name__
            spent = time.monotonic() - started
            if spent >= patience:
                raise InferenceError(
                    f"the model server at {self._url} did not answer {path} for {spent:.0f} s ({problem}); "
                    "is it running, and is this its address (base_url, GRISTMILL_MODEL_URL)?"
                )
            if spent > 1.0:
                self._say(away=True, problem=problem, patience=patience)
            await asyncio.sleep(min(pause * random.uniform(0.5, 1.5), patience - spent))
            pause = min(pause * 2, _LONGEST_PAUSE)

    def _say(self, *, away: bool, problem: str = "", patience: float = 0.0) -> None:
        """Once when the server goes away, once when it is back, however many requests wait for it."""
        if away and not self._away:
            logger.warning("model server at %s: %s; trying on for up to %.0f s", self._url, problem, patience)
        elif self._away and not away:
            logger.info("model server at %s answers again", self._url)
        self._away = away

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()
