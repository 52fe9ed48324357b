"""A server with OpenAI's API that a reward asks: embeddings, or a judge."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import SecretStr

from gristmill.internal.backoff import Backoff
from gristmill.internal.redaction import redact_text
from gristmill_env.errors import RewardError

_CALLS = 4
"""Requests until the server counts as away."""
_REMEDIES = {401: "; set api_key", 403: "; set api_key", 404: "; are base_url and model_name right?"}


@dataclass(frozen=True)
class RewardServer:
    """The server's address and key. Not tied to an event loop. Equal servers give equal answers."""

    base_url: str
    """With or without /v1."""
    api_key: SecretStr | None = None
    what: str = "server"
    """For messages: "embeddings server"."""
    timeout: float = 60.0
    """Seconds for each answer."""
    remedies: Mapping[int, str] = field(default_factory=dict, compare=False)
    """Text for the message of a refusal, by HTTP status."""
    before_request: Callable[[], Awaitable[None]] | None = field(default=None, compare=False)
    """Called before each request, also a repeated one."""

    async def post(self, path: str, body: Mapping[str, Any]) -> bytes:
        """Returns the answer to a request, `path` for example "embeddings".

        Raises RewardError if the server refuses the request, or fails four times. The second error may pass, so that
        the run waits for the server.
        """
        # Here, because every process with rewards imports this module, and few use it.
        import httpx

        from gristmill.internal import connections

        url = self.base_url.rstrip("/").removesuffix("/v1") + f"/v1/{path}"
        without_password = redact_text(url)  # without a password
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key.get_secret_value()}"
        content = json.dumps(body)  # escapes half characters, which UTF-8 cannot hold
        problem, backoff = "", Backoff(0.25, 1.0)
        async with connections.async_client(url, headers=headers, timeout=self.timeout) as http:
            for number in range(_CALLS):
                if number:
                    await asyncio.sleep(backoff.next())
                if self.before_request is not None:
                    await self.before_request()
                try:
                    async with asyncio.timeout(self.timeout):  # httpx limits the time between two bytes.
                        answer = await http.post(url, content=content)
                    if answer.is_success:
                        return answer.content
                    problem = f"HTTP {answer.status_code}: {answer.text[:300]}"
                    if answer.status_code < 500 and answer.status_code not in (408, 429):
                        remedy = {**_REMEDIES, **self.remedies}.get(answer.status_code, "")
                        raise RewardError(
                            "reward_server_refused",
                            f"the {self.what} at {without_password} refuses: {problem}{remedy}",
                            url=without_password,
                            status=answer.status_code,
                        )
                except (httpx.TransportError, TimeoutError) as error:
                    problem = str(error) or type(error).__name__
        raise RewardError(
            "reward_server_unreachable",
            f"the {self.what} at {without_password} does not answer ({problem}); is it running, and is "
            "base_url its address?",
            url=without_password,
        ).passing()
