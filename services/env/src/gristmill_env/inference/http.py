"""One request to a model server. The result is an answer, a refusal, or a temporary error."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import httpx
import msgspec
from pydantic import SecretStr

from gristmill.internal import connections
from gristmill.internal.backoff import asked_pause
from gristmill.internal.redaction import redact_text
from gristmill_env.errors import InferenceError

T = TypeVar("T")

_CONNECT = 10.0
"""Seconds to connect. Shorter than the time for an answer, so that a missing machine is detected early."""
_JSON = {"Content-Type": "application/json"}
_OF_THE_REQUEST = frozenset({400, 413, 422})


class ServerTroubleError(Exception):
    """The server is temporarily unavailable, for example unreachable or overloaded. A retry may succeed."""

    def __init__(self, path: str, problem: str, wait: float = 0.0) -> None:
        """`wait`: the seconds in the server's Retry-After header."""
        super().__init__(problem)
        self.problem = problem
        self.told = f"{path}: {problem}"
        self.wait = wait


class RefusedError(InferenceError):
    """The server refused the request. A retry would give the same result."""

    def __init__(self, code: str, message: str, /, *, text: str, status: int, **values: object) -> None:
        """`text`: the body of the server's answer. `status`: its HTTP status."""
        super().__init__(code, message, status=status, **values)
        self.status = status
        self.text = text

    @property
    def may_mean_the_prompt(self) -> bool:
        """Whether the server rejects the request's content, for example the prompt or a setting of the run."""
        return self.status in _OF_THE_REQUEST


class ServerHttp:
    """An HTTP client for one server."""

    def __init__(self, url: str, *, api_key: SecretStr | None, timeout: float | None) -> None:
        """`timeout`: seconds that one request may take, from its first byte to the last byte of the answer; None: no
        limit."""
        self.url = redact_text(url)
        """The address for messages, without a password."""
        self._root = url
        self.timeout = timeout
        self._client = connections.async_client(
            url,
            headers={"Authorization": f"Bearer {api_key.get_secret_value()}"} if api_key else {},
            timeout=httpx.Timeout(None, connect=_CONNECT),
            limits=None,  # `Endpoint` limits the number of requests; a limit here would only hide their queue
        )

    async def ask(self, method: str, path: str, kind: type[T], *, json: Any = None, timeout: float | None = None) -> T:
        """Returns the answer, decoded as `kind`. `path`: relative to the server's address, or a whole URL.

        `timeout`: seconds for this request, in place of the server's `timeout`. Raises ServerTroubleError after that
        time, for a failed connection, status 429 and status 5xx, and RefusedError for any other error status. Raises
        InferenceError if the answer is not a valid `kind`.
        """
        allowed = self.timeout if timeout is None else timeout
        told = self.path(path)
        content = None if json is None else msgspec.json.encode(json)
        try:
            async with asyncio.timeout(allowed):
                answer = await self._client.request(method, path, content=content, headers=_JSON if content else None)
        except TimeoutError as error:
            raise ServerTroubleError(told, f"no answer within {allowed:g} s") from error
        except httpx.RequestError as error:
            raise ServerTroubleError(told, str(error) or type(error).__name__) from error
        if answer.status_code >= 500 or answer.status_code == 429:
            problem = f"HTTP {answer.status_code}: {answer.text[:200]}"
            raise ServerTroubleError(told, problem, asked_pause(answer.headers))
        if not answer.is_success:
            raise self._refusal(answer, told)
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except ValueError as error:
            raise InferenceError(
                "answer_invalid",
                f"the model server at {self.url} does not answer {told} as it should: {error}",
                url=self.url,
                path=told,
            ) from error

    def path(self, url: str) -> str:
        """Returns the path of `url` relative to the server's address, for messages."""
        return redact_text(url.removeprefix(self._root))

    async def close(self) -> None:
        """Closes all connections."""
        await self._client.aclose()

    def _refusal(self, answer: httpx.Response, path: str) -> RefusedError:
        status, text = answer.status_code, answer.text
        if status in (401, 403):
            return RefusedError(
                "api_key_refused",
                f"the model server at {self.url} refuses {path}: set api_key in server_configs",
                text=text,
                status=status,
                url=self.url,
                path=path,
            )
        return RefusedError(
            "request_refused",
            f"the model server at {self.url} refused {path}: HTTP {status}: {text[:300]}",
            text=text,
            status=status,
            url=self.url,
            path=path,
        )
