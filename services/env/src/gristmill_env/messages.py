"""A conversation's messages, as chat templates and servers take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Message = Mapping[str, Any]
"""`role` (system, user, assistant, tool) and `content`, text; more keys are the template's business."""


def system(content: str) -> Message:
    """What the model is told to be."""
    return {"role": "system", "content": content}


def user(content: str) -> Message:
    """What the model is to answer."""
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    """What the model said."""
    return {"role": "assistant", "content": content}
