"""Thinking before the answer: what the settings ask for, in the words that each kind of text server knows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gristmill_env.settings import EnvConfig


class Dialect(StrEnum):
    """Whose additions to the chat API a text server understands."""

    VLLM = "vllm"
    """Continued messages, stop tokens, options of the chat template."""
    OPENAI = "openai"
    """api.openai.com itself."""
    OTHER = "other"
    """Any other; of additions, only OpenRouter's `reasoning` is ever sent, and only when asked for."""


@dataclass(frozen=True)
class Thinking:
    """thinking_mode, reasoning_effort and max_reasoning_tokens of a run."""

    enabled: bool | None = None
    """None leaves it to the model."""
    effort: str | None = None
    max_tokens: int | None = None

    @classmethod
    def of(cls, config: EnvConfig) -> Thinking:
        """As the run's settings say. Whoever sets an effort or a limit wants thinking, as in Atropos."""
        effort, limit = config.reasoning_effort, config.max_reasoning_tokens
        if effort is None and limit is None:
            return cls(config.thinking_mode)
        return cls(effort != "none", effort, limit)

    def body(self, dialect: Dialect) -> dict[str, Any]:
        """What is added to a request. Nothing where nothing is set.

        OpenAI knows an effort only: enabled alone is sent as "medium", and a limit or "off" cannot be said there.
        OpenRouter's `reasoning` takes an effort or a limit, not both; the effort is sent.
        """
        if self.enabled is None:
            return {}
        if dialect is Dialect.OPENAI:
            effort = self.effort or ("medium" if self.enabled else None)
            return {} if effort is None else {"reasoning_effort": effort}
        if dialect is Dialect.VLLM:
            body: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": self.enabled}}
            if self.effort is not None:
                body["reasoning_effort"] = self.effort
            if self.enabled and self.max_tokens is not None:
                body["thinking_token_budget"] = self.max_tokens
            return body
        reasoning: dict[str, Any] = {"enabled": self.enabled}
        if self.effort is not None:
            reasoning["effort"] = self.effort
        elif self.enabled and self.max_tokens is not None:
            reasoning["max_tokens"] = self.max_tokens
        return {"reasoning": reasoning}
