"""Groups that hold only tokens: splits prompts from completions, and decodes both to text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from gristmill import TrajectoryGroup
from gristmill_env.errors import SavedError
from gristmill_env.saved.conversations import conversations_of, split_conversations
from gristmill_env.saved.group import SavedCompletion, SavedGroup, content_of

Decode = Callable[[Sequence[int], bool], str]
"""Converts token ids to text; the second argument keeps special tokens."""


def no_tokenizer(token_ids: Sequence[int], special: bool) -> str:
    """A `Decode` for sources whose groups should all hold text. Raises SavedError."""
    raise SavedError(
        "no_tokenizer", "this group holds token ids and no text, and there is no tokenizer to read them with"
    )


def prompt_length(trained: npt.NDArray[np.bool_], where: str) -> int:
    """Returns the tokens before the first sampled token. `trained`: bool[tokens] of one sequence. Raises SavedError."""
    if not trained.any():
        raise SavedError(
            "nothing_trained", f"{where} has a sequence without a completion: its mask trains on no token", where=where
        )
    return int(trained.argmax())


def from_trajectory(group: TrajectoryGroup, decode: Decode) -> SavedGroup:
    """Converts a group that the trajectory API archived. The group has a row number but neither answer nor columns.

    The group has messages only if the run sent them (`include_messages`). Without messages, the text of a conversation
    with several turns is everything after the first prompt.
    """
    where = f"group {group.group_id}"
    names = list(group.reward_parts)
    conversations = conversations_of(group.messages, group.size)
    messages, rests = split_conversations(conversations) if conversations is not None else (None, [])
    completions = []
    start = 0
    for number, end in enumerate(np.cumsum(group.lengths).tolist()):
        prompt = prompt_length(group.mask[start:end], where)
        ids = group.tokens[start + prompt : end].tolist()
        mask = group.mask[start + prompt : end]
        completions.append(
            SavedCompletion(
                text=content_of(rests[number][-1]) if rests else decode(ids, False),
                messages=rests[number] if rests and len(rests[number]) > 1 else None,
                tokens=int(mask.sum()),
                token_ids=ids,
                mask=None if mask.all() else mask.tolist(),
                logprobs=group.logprobs[start + prompt : end].tolist(),
                finish_reason=group.finish_reasons[number],
                scores={name: group.reward_parts[name][number] for name in names},
                total=float(group.rewards[number]),
            )
        )
        start = end
    prompt_ids = group.tokens[: prompt_length(group.mask[: group.lengths[0]], where)].tolist()
    text = decode(prompt_ids, True) if messages is None else None
    versions = sorted({span.version for spans in group.versions for span in spans})
    return SavedGroup(
        run=group.run_id,
        row=group.row,
        prompt=content_of(messages[-1]) if messages else text or "",
        prompt_text=text,
        prompt_token_ids=prompt_ids,
        messages=messages,
        sampling=group.sampling,
        completions=completions,
        versions=versions,
    )
