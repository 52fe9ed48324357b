"""Parts of answers, and clients with short timeouts."""

from __future__ import annotations

from typing import Any

from tests.unit.env.conftest import FailingServer

from gristmill import SamplingParams
from gristmill_env.inference import GenerationRequest, ModelServers, Thinking
from gristmill_env.settings.servers import ServerConfig

GENERATE = "/inference/v1/generate"
CHAT = "/v1/chat/completions"
SAMPLING = SamplingParams(temperature=1.0, max_tokens=4)
ASK = GenerationRequest(token_ids=[1, 2], messages=[{"role": "user", "content": "hello"}], sampling=SAMPLING)


def client(*servers: FailingServer | str, patience: float = 0.5, thinking: Thinking | None = None, **settings: Any) -> (
    ModelServers
):  # fmt: skip
    """Builds clients of servers, or of their addresses, all with the same settings."""
    urls = [server if isinstance(server, str) else server.url for server in servers]
    configs = [ServerConfig(base_url=url, **settings) for url in urls]
    return ModelServers(configs, patience=patience, thinking=thinking or Thinking())


def choice(**changes: Any) -> dict[str, Any]:
    """A completion with token ids, of one token."""
    logprobs = {"content": [{"token_id": 5, "logprob": -0.5, "rank": 1}]}
    return {"finish_reason": "stop", "token_ids": [5], "logprobs": logprobs, "weight_versions": None} | changes


def said(content: str | None = "hi", finish_reason: str | None = "stop", **message: Any) -> dict[str, Any]:
    """A completion as text."""
    return {"finish_reason": finish_reason, "message": {"role": "assistant", "content": content} | message}


def answers(*choices: dict[str, Any]) -> tuple[int, Any]:
    """A whole answer."""
    return 200, {"choices": list(choices), "usage": {"completion_tokens": 7}}
