"""Rows: their sources, their order, and the fields that prompts and rewards receive."""

from gristmill_env.data.dataset import Item, PromptDataset
from gristmill_env.data.messages import (
    Message,
    assistant,
    message_problem,
    object_of,
    refuse_half_characters,
    system,
    template_form,
    user,
)

__all__ = [
    "Item",
    "Message",
    "PromptDataset",
    "assistant",
    "message_problem",
    "object_of",
    "refuse_half_characters",
    "system",
    "template_form",
    "user",
]
