"""The bodies of Atropos' requests, read as loosely as its own server reads them: "1" is 1, unknown keys are ignored.

FastAPI reports a body that does not fit with Atropos' 422 `{"detail": [...]}`, word for word. fast_parse.py reads
groups first. These models read a group only if fast_parse.py raises NeedsSlowPath.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BaseModel, Field, field_validator

Finite = Annotated[float, Field(allow_inf_nan=False)]
Word = Annotated[str, Field(max_length=4096)]


MOST_GROUPS: Final = 16_384
"""In one request: one call of a script stores them."""


class Registration(BaseModel):
    """The registration of a trainer."""

    wandb_group: Word
    wandb_project: Word
    batch_size: int
    """Sequences a batch, exactly."""
    max_token_len: int
    checkpoint_dir: Word
    save_checkpoint_interval: int
    starting_step: int
    num_steps: int


class RegisterEnv(BaseModel):
    max_token_length: int
    desired_name: Word
    weight: Finite
    group_size: int
    min_batch_allocation: Finite | None = None
    """Share of every batch that must come from this environment."""


class EnvIdentifier(BaseModel):
    env_id: int


class ScoredData(BaseModel):
    """One group: G sequences with their scores.

    Fields by sequence have G entries. Fields by token have one entry per token.
    """

    tokens: list[list[int]]
    masks: list[list[int]]
    """By token: the token's id if it is trained on, otherwise -100."""
    scores: list[float]
    advantages: list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    messages: list[list[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] | None = None
    inference_logprobs: list[list[float]] | None = None
    """By token: 1.0, which no log-probability is, if the token was not sampled."""
    overrides: list[dict[Any, Any]] | None = None
    group_overrides: dict[Any, Any] | None = None
    images: Any | None = None
    env_id: int | None = None
    distill_token_ids: list[list[list[int]]] | None = None
    distill_logprobs: list[list[list[float]]] | None = None

    @field_validator("messages", mode="before")
    @classmethod
    def _role_and_content(cls, messages: Any) -> Any:
        for conversation in messages if isinstance(messages, list) else ():
            if not isinstance(conversation, list):
                return messages  # the type check that follows says it better
            for message in conversation:
                if isinstance(message, dict | str) and not ("role" in message and "content" in message):
                    raise ValueError("Message must have 'role' and 'content' fields")
        return messages


Groups = Annotated[list[ScoredData], Field(max_length=MOST_GROUPS)]
