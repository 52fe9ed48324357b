"""The fields of the servers' answers that Gristmill reads. Other fields are ignored."""

from __future__ import annotations

import msgspec


class TokenLogprob(msgspec.Struct):
    """One sampled token."""

    token_id: int
    logprob: float


class Logprobs(msgspec.Struct):
    """One entry per token."""

    content: list[TokenLogprob] | None = None


class LabelSpan(msgspec.Struct):
    """Output tokens [start, end) were sampled under the server's label `version`."""

    version: str
    start: int
    end: int


class Choice(msgspec.Struct):
    """One completion of POST /inference/v1/generate."""

    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    weight_versions: list[LabelSpan] | None = None


class Generated(msgspec.Struct):
    """Answer of POST /inference/v1/generate."""

    choices: list[Choice]


class ChatMessage(msgspec.Struct):
    """The model's message. Servers with a reasoning parser return the reasoning separately, under either name."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChatChoice(msgspec.Struct):
    """One completion of POST /v1/chat/completions."""

    message: ChatMessage
    finish_reason: str | None = None


class Usage(msgspec.Struct):
    """Number of tokens of all choices together."""

    completion_tokens: int | None = None


class Chatted(msgspec.Struct):
    """Answer of POST /v1/chat/completions."""

    choices: list[ChatChoice]
    usage: Usage | None = None


class ModelCard(msgspec.Struct):
    """One served model."""

    id: str
    root: str | None = None
    max_model_len: int | None = None
    owned_by: str | None = None
    """ "vllm" if the server is vLLM."""


class Models(msgspec.Struct):
    """Answer of GET /v1/models."""

    data: list[ModelCard]


class WeightInfo(msgspec.Struct):
    """Answer of GET /weight_info."""

    weight_version: str
