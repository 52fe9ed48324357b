"""What is asked of a model server, and what comes back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gristmill import SamplingParams
from gristmill_env.inference.wire import LabelSpan

_CHARACTERS_A_TOKEN = 4
"""Of English text, roughly. Only for weighing the load of a prompt whose tokens are not known."""


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One prompt, and how to sample from it.

    A server that takes token ids is sent `token_ids`; one that takes text only is sent `messages` and `prefill`.
    A caller that does not know which it will be gives both.
    """

    sampling: SamplingParams
    count: int = 1
    """Completions wanted."""
    token_ids: Sequence[int] = ()
    """The whole prompt: template, prefill and all."""
    messages: Sequence[Mapping[str, Any]] = ()
    """The same as chat messages, {"role": ..., "content": ...}, without the prefill."""
    prefill: str = ""
    """How the answer begins. The completion goes on from there and does not repeat it."""
    stop: Sequence[str] = ()
    """Texts that end a completion. They stay in it: they were sampled."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end a completion, beside the model's own. They stay in it."""

    @property
    def cost(self) -> int:
        """Tokens that the request may keep a server busy with."""
        prompt = len(self.token_ids)
        if not prompt:
            prompt = sum(len(str(message.get("content", ""))) for message in self.messages) // _CHARACTERS_A_TOKEN
        return prompt + self.sampling.max_tokens * self.count

    def with_short_prompt(self) -> GenerationRequest:
        """One completion of a prompt that no server can mind, with all else the same; a system message stays one."""
        system = [message for message in self.messages[:1] if message.get("role") == "system"]
        short = [{"role": message["role"], "content": "Hi"} for message in (*system, {"role": "user"})]
        return dataclasses.replace(self, token_ids=(), messages=short, count=1)

    def with_count(self, count: int) -> GenerationRequest:
        """The same for another number of completions."""
        return dataclasses.replace(self, count=count)


@dataclass(frozen=True)
class Completion:
    """One completion, as sampled."""

    token_ids: list[int]
    """At least one, the token that ends the turn included; empty where the server gives text only."""
    logprobs: list[float]
    """One a token: log-probability under the distribution it was drawn from."""
    finish_reason: str
    """ "stop", or "length" when it was cut. A text server's other reasons ("content_filter") as it gives them."""
    labels: list[LabelSpan]
    """Which of the server's weight labels sampled which tokens. "default" until weights were published to it."""
    text: str | None = None
    """What a text server wrote, its reasoning put back between <think> tags. None where there are token ids."""
    counted: int | None = None
    """Tokens, as a text server counts them; None where it tells only the sum of several completions."""

    @property
    def length(self) -> int | None:
        """Number of tokens, where it is known."""
        return len(self.token_ids) if self.text is None else self.counted


@dataclass(frozen=True)
class ServedModel:
    """What the servers say they serve."""

    name: str
    root: str | None
    """Folder or hub id it was loaded from."""
    max_model_len: int | None
    text_only: bool = False
    """Whether completions come as text, without token ids: of no use for training."""
