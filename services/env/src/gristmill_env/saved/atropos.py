"""Groups as Atropos' environments save them: parallel lists of tokens, masks and scores, with or without messages."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from gristmill_env.errors import SavedError
from gristmill_env.saved.group import Message, SavedCompletion, SavedGroup, content_of
from gristmill_env.saved.tokens import Decode, prompt_length

_NOT_TRAINED = -100


class AtroposGroup(msgspec.Struct):
    """As far as it is read. One entry a sequence, prompt included."""

    tokens: list[list[int]]
    scores: list[float]
    masks: list[list[int]] = []
    """-100 where a token was given and not sampled."""
    messages: list[Any] | None = None
    inference_logprobs: list[list[float]] | None = None


def from_atropos(group: AtroposGroup, name: str, where: str, decode: Decode) -> SavedGroup:
    """`name`: what the run is called; `where`: the group's place, for messages. Raises SavedError."""
    if len(group.scores) != len(group.tokens) or len(group.masks) != len(group.tokens) or not group.tokens:
        raise SavedError(
            f"{where} has {len(group.tokens)} sequences, {len(group.masks)} masks and {len(group.scores)} scores; "
            "there is one of each a sequence"
        )
    starts = []
    turns: list[list[Message] | None]
    for tokens, mask in zip(group.tokens, group.masks, strict=True):
        if len(tokens) != len(mask):
            raise SavedError(f"{where} has a sequence of {len(tokens)} tokens with a mask of {len(mask)}")
        starts.append(prompt_length(np.array(mask) != _NOT_TRAINED, where))
    prompt_ids = group.tokens[0][: starts[0]]
    conversations = _conversations(group.messages, len(group.tokens))
    if conversations is None:
        messages, turns = None, [None] * len(group.tokens)
        texts = [decode(tokens[start:], False) for tokens, start in zip(group.tokens, starts, strict=True)]
        prompt = prompt_text = decode(prompt_ids, True)
    else:
        messages, rests = split_conversations(conversations)
        texts = [content_of(rest[-1]) for rest in rests]
        turns = [rest if len(rest) > 1 else None for rest in rests]
        prompt, prompt_text = content_of(messages[-1]) if messages else "", None
    logprobs = group.inference_logprobs
    return SavedGroup(
        run=name,
        prompt=prompt,
        prompt_text=prompt_text,
        prompt_token_ids=prompt_ids,
        messages=messages,
        completions=[
            SavedCompletion(
                text=text,
                messages=turn,
                tokens=len(tokens) - start,
                token_ids=tokens[start:],
                logprobs=logprobs[number][start:] if logprobs and len(logprobs[number]) == len(tokens) else None,
                total=score,
            )
            for number, (tokens, start, text, turn, score) in enumerate(
                zip(group.tokens, starts, texts, turns, group.scores, strict=True)
            )
        ],
    )


def split_conversations(conversations: list[list[Message]]) -> tuple[list[Message], list[list[Message]]]:
    """What all conversations have in common, up to the turn before an answer; and what each has after it."""
    common = 0
    shortest = min(map(len, conversations)) - 1  # the last message of each is its own
    first = conversations[0]
    while common < shortest and all(conversation[common] == first[common] for conversation in conversations):
        common += 1
    while common > 0 and first[common - 1].get("role") == "assistant":
        common -= 1
    return first[:common], [conversation[common:] for conversation in conversations]


def _conversations(messages: list[Any] | None, count: int) -> list[list[Message]] | None:
    """The messages, if they are conversations that end with an answer. What `include_messages` fills in by itself,
    the whole sequence as one user message, is none; nor is plain text."""
    if messages is None or len(messages) != count:
        return None
    for conversation in messages:
        if not isinstance(conversation, list) or not all(isinstance(m, dict) and "role" in m for m in conversation):
            return None
        if not conversation or conversation[-1]["role"] != "assistant":
            return None
    return messages
