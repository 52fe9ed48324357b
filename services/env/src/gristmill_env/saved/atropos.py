"""Groups as Atropos' environments save them: parallel lists of tokens, masks and scores, with or without messages."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from gristmill_env.errors import SavedError
from gristmill_env.saved.conversations import conversations_of, split_conversations
from gristmill_env.saved.group import Message, SavedCompletion, SavedGroup, content_of
from gristmill_env.saved.tokens import Decode, prompt_length

_NOT_TRAINED = -100


class AtroposGroup(msgspec.Struct):
    """The fields that are read. Each list has one entry per sequence; a sequence includes its prompt."""

    tokens: list[list[int]]
    scores: list[float]
    masks: list[list[int]] = []
    """-100 for a token that was given instead of sampled."""
    messages: list[Any] | None = None
    inference_logprobs: list[list[float]] | None = None


def from_atropos(group: AtroposGroup, name: str, where: str, decode: Decode) -> SavedGroup:
    """Converts a group. `name`: the run's name; `where`: the group's place, for messages. Raises SavedError."""
    if len(group.scores) != len(group.tokens) or len(group.masks) != len(group.tokens) or not group.tokens:
        raise SavedError(
            "length_mismatch",
            f"{where} has {len(group.tokens)} sequences, {len(group.masks)} masks and {len(group.scores)} scores; "
            "there is one of each a sequence",
            where=where,
            sequences=len(group.tokens),
            masks=len(group.masks),
            scores=len(group.scores),
        )
    starts = []
    turns: list[list[Message] | None]
    for tokens, mask in zip(group.tokens, group.masks, strict=True):
        if len(tokens) != len(mask):
            raise SavedError(
                "length_mismatch",
                f"{where} has a sequence of {len(tokens)} tokens with a mask of {len(mask)}",
                where=where,
                tokens=len(tokens),
                mask=len(mask),
            )
        starts.append(prompt_length(np.array(mask) != _NOT_TRAINED, where))
    prompt_ids = group.tokens[0][: starts[0]]
    conversations = conversations_of(group.messages, len(group.tokens))
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
