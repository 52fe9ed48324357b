"""The conversations of a group, one per sequence, and their common beginning."""

from __future__ import annotations

from typing import Any

from gristmill_env.saved.group import Message


def split_conversations(conversations: list[list[Message]]) -> tuple[list[Message], list[list[Message]]]:
    """Returns the common beginning of all conversations, up to the turn before an answer, and the rest of each."""
    common = 0
    shortest = min(map(len, conversations)) - 1  # the last message of each is its own
    first = conversations[0]
    while common < shortest and all(conversation[common] == first[common] for conversation in conversations):
        common += 1
    while common > 0 and first[common - 1].get("role") == "assistant":
        common -= 1
    return first[:common], [conversation[common:] for conversation in conversations]


def conversations_of(messages: list[Any] | None, count: int) -> list[list[Message]] | None:
    """Returns the messages if they are conversations that end with an answer, otherwise None.

    Atropos' `include_messages` may store the whole sequence as one user message, and that is not a conversation."""
    if messages is None or len(messages) != count:
        return None
    for conversation in messages:
        if not isinstance(conversation, list) or not all(isinstance(m, dict) and "role" in m for m in conversation):
            return None
        if not conversation or conversation[-1]["role"] != "assistant":
            return None
    return messages
