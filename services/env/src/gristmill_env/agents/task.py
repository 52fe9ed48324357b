"""What an agent receives: the task of a row, and the place where the model answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from gristmill_env.errors import EpisodeError


class AgentTask(msgspec.Struct, frozen=True):
    """The task of one rollout."""

    prompt: str
    """The row's prompt as text."""
    messages: list[dict[str, Any]]
    """The row's prompt as messages, with the run's system prompt."""
    answer: str | None = None
    """The row's answer; None if the data set has none."""
    row: dict[str, Any] = {}
    """The row's columns."""
    index: int = 0
    """The row's number in the file."""

    def encoded(self, encode: Callable[[AgentTask], bytes]) -> bytes:
        """Returns the task as `encode` writes it. Raises EpisodeError for a row that holds what no message can hold."""
        try:
            return encode(self)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            text = f"row {self.index} cannot be sent to an agent: {error}; leave the column out, or write it as text"
            raise EpisodeError("row_not_encodable", text, row=self.index) from error


class Endpoint(msgspec.Struct, frozen=True):
    """Where the model answers this rollout's requests."""

    base_url: str
    """For OpenAI's clients: ends in /v1."""
    anthropic_url: str
    """For Anthropic's client: without /v1."""
    key: str
    """The API key, which names the rollout."""
    model: str
    """The model's name. Any other name reaches the same model."""
