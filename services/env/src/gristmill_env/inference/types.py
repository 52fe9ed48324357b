"""Requests to model servers, their completions, and the fields of the servers' answers that Gristmill reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gristmill import SamplingParams

_SHORT = 4
"""Tokens of a short prompt."""
_CHARACTERS_A_TOKEN = 4
"""Approximate characters per token of English text. Used only to estimate the load of a prompt without token ids."""


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One prompt and its sampling parameters.

    A server that accepts token ids gets `token_ids`. A text-only server gets `messages` and `prefill`. A caller that
    does not know the kind of server sets all three.
    """

    sampling: SamplingParams
    count: int = 1
    """Number of completions."""
    token_ids: Sequence[int] = ()
    """The whole prompt, including the chat template's tokens and the prefill."""
    messages: Sequence[Mapping[str, Any]] = ()
    """The prompt as chat messages, {"role": ..., "content": ...}, without the prefill."""
    prefill: str = ""
    """The beginning of the answer. The completion continues the prefill and does not repeat it."""
    stop: Sequence[str] = ()
    """Texts that end a completion. They remain in the completion, because the model sampled them."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end a completion, in addition to the model's own end tokens. They remain in the completion."""
    earlier: str | None = None
    """URL of the server that sampled the earlier turns, and so has computed this prompt's beginning."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """More sampling parameters of the run under vLLM's names (`DatasetConfig.more_sampling`)."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """`chat_template` and `chat_template_kwargs` of the run, for a server that gets messages."""
    constraint: Mapping[str, Any] = field(default_factory=dict)
    """More fields of vLLM's sampling parameters, which change the distribution: the completion is not trained."""

    @property
    def cost(self) -> int:
        """Maximum number of tokens that a server processes for the request."""
        prompt = len(self.token_ids)
        if not prompt:
            prompt = sum(len(str(message.get("content", ""))) for message in self.messages) // _CHARACTERS_A_TOKEN
        return prompt + self.sampling.max_tokens * self.count

    def with_short_prompt(self) -> GenerationRequest:
        """Returns the request for one completion of a short, harmless prompt. A system message remains but is short.

        Token ids are the first ids of the prompt, which are the chat template's.
        """
        system = [message for message in self.messages[:1] if message.get("role") == "system"]
        short = [{"role": message["role"], "content": "Hi"} for message in (*system, {"role": "user"})]
        return dataclasses.replace(self, token_ids=self.token_ids[:_SHORT], messages=short, count=1, constraint={})

    def with_count(self, count: int) -> GenerationRequest:
        """Returns the same request for another number of completions."""
        return dataclasses.replace(self, count=count)


@dataclass(frozen=True)
class Completion:
    """One completion, as sampled."""

    token_ids: list[int]
    """Sampled tokens, including the token that ends the turn; never empty, except for a text-only server."""
    logprobs: list[float]
    """Log-probability of each token under the distribution that the token was drawn from."""
    finish_reason: str
    """ "stop", or "length" if the completion is truncated. Other reasons of a text server ("content_filter") are
    unchanged."""
    labels: list[LabelSpan]
    """The server's weight label for each span of tokens. "default" until weights were published to the server."""
    text: str | None = None
    """Text from a text server, with its reasoning between <think> tags. None if the completion has token ids."""
    counted: int | None = None
    """Number of tokens as a text server counts them. None if the server reports only a sum over completions."""
    server: str | None = None
    """URL of the server that sampled the completion."""

    @property
    def length(self) -> int | None:
        """Number of tokens; None if unknown."""
        return len(self.token_ids) if self.text is None else self.counted


@dataclass(frozen=True)
class ServedModel:
    """The model that the servers report."""

    name: str
    root: str | None
    """Folder or hub id that the model was loaded from."""
    max_model_len: int | None
    text_only: bool = False
    """Whether completions are text without token ids, which cannot be used for training."""


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
    tool_calls: list[dict[str, Any]] | None = None
    """In OpenAI's form."""


class ChatChoice(msgspec.Struct):
    """One completion of POST /v1/chat/completions, or of its /derender."""

    message: ChatMessage
    finish_reason: str | None = None


class Usage(msgspec.Struct):
    """Number of tokens of all choices together."""

    completion_tokens: int | None = None


class Chatted(msgspec.Struct):
    """Answer of POST /v1/chat/completions, or of its /derender."""

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
