"""The turns of completions: from the conversations that the environment sent, else from the tokens' mask.

Without conversations (`include_messages: false`) each run of sampled tokens is one reply of the model, and the tokens
between two replies are one turn of the environment, with the chat template's special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Turn = dict[str, Any]
"""role, content, and sometimes thinking and tool_calls."""
_SHOWN = ("role", "content", "tool_calls", "name")


def split(conversations: Sequence[str | None]) -> tuple[list[Turn] | None, list[list[Turn]]]:
    """Returns the messages that all conversations begin with, up to the turn before a reply, and the rest of each.

    `conversations`: JSON. (None, []) if any of them is missing, or is not a list of messages that ends with a reply.
    """
    parsed = [_conversation(one) for one in conversations]
    known = [one for one in parsed if one is not None]
    if not known or len(known) < len(parsed):
        return None, []
    first, shortest = known[0], min(map(len, known)) - 1
    common = 0
    while common < shortest and all(one[common] == first[common] for one in known):
        common += 1
    while common > 0 and first[common - 1]["role"] == "assistant":
        common -= 1
    return first[:common], [[with_thinking(turn) for turn in one[common:]] for one in known]


def of_mask(
    tokens: Sequence[int], replies: Sequence[int], decode: Callable[[Sequence[int], bool], str | None]
) -> list[Turn]:
    """Returns the turns after the prompt. `replies`: first token of each reply and the token after its last, in pairs.

    `decode`: returns the text of tokens, without special tokens if its second argument is True.
    """
    pairs = list(zip(replies[::2], replies[1::2], strict=True))
    turns: list[Turn] = []
    at = pairs[0][0] if pairs else len(tokens)
    for start, end in [*pairs, (len(tokens), len(tokens))]:
        for role, ids in (("environment", tokens[at:start]), ("assistant", tokens[start:end])):
            text = decode(ids, role == "assistant") if len(ids) else None
            if text is not None:
                turns.append(with_thinking({"role": role, "content": text}))
        at = end
    return turns


def with_thinking(turn: Turn) -> Turn:
    """Returns a reply with its thinking apart from its answer."""
    content, thinking = turn["content"], turn.get("thinking")
    if turn["role"] != "assistant" or thinking or not isinstance(content, str) or "</think>" not in content:
        return turn
    thinking, _, rest = content.partition("</think>")
    return {**turn, "content": rest.strip(), "thinking": thinking.strip().removeprefix("<think>").strip()}


def _conversation(text: str | None) -> list[Turn] | None:
    """Atropos' `include_messages` may store the whole sequence as one user message, which is not a conversation."""
    try:
        found = None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, list) or not found or not all(isinstance(one, Mapping) for one in found):
        return None
    turns = [_turn(one) for one in found]
    return turns if all(turn["role"] for turn in turns) and turns[-1]["role"] == "assistant" else None


def _turn(message: Mapping[str, Any]) -> Turn:
    turn = {name: message[name] for name in _SHOWN if message.get(name) is not None}
    turn["role"] = message["role"] if isinstance(message.get("role"), str) else ""
    turn.setdefault("content", "")
    thinking = message.get("reasoning_content")
    return {**turn, "thinking": thinking} if isinstance(thinking, str) and thinking else turn
