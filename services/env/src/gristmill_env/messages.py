"""A conversation's messages, in the form of chat templates and servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Message = Mapping[str, Any]
"""`role` (system, user, assistant, tool) and `content`, text; a template may use more keys."""


def system(content: str) -> Message:
    """Returns a message with instructions for the model."""
    return {"role": "system", "content": content}


def user(content: str) -> Message:
    """Returns a message for the model to answer."""
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    """Returns a message by the model."""
    return {"role": "assistant", "content": content}
