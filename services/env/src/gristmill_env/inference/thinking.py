"""Translates the settings for thinking into request fields for each kind of text server."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gristmill_env.settings import EnvConfig


class Dialect(StrEnum):
    """The extensions of the chat API that a text server understands."""

    VLLM = "vllm"
    """vLLM: continued messages, stop tokens, options of the chat template."""
    OPENAI = "openai"
    """api.openai.com."""
    OTHER = "other"
    """Any other server. The only extension sent is OpenRouter's `reasoning`, and only if thinking is configured."""


@dataclass(frozen=True)
class Thinking:
    """thinking_mode, reasoning_effort and max_reasoning_tokens of a run."""

    enabled: bool | None = None
    """None uses the model's default."""
    effort: str | None = None
    max_tokens: int | None = None

    @classmethod
    def of(cls, config: EnvConfig) -> Thinking:
        """Reads the run's settings. As in Atropos, an effort or a limit enables thinking."""
        effort, limit = config.reasoning_effort, config.max_reasoning_tokens
        if effort is None and limit is None:
            return cls(config.thinking_mode)
        return cls(effort != "none", effort, limit)

    def body(self, dialect: Dialect) -> dict[str, Any]:
        """Returns the fields to add to a request; none if `enabled` is None.

        OpenAI accepts only an effort. There, thinking without an effort is sent as "medium", and a limit or "off"
        cannot be expressed. OpenRouter's `reasoning` accepts an effort or a limit; if both are set, only the effort is
        sent.
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
