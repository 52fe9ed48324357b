"""One scored sequence, as an environment has it, and the arrays of a group that are made of such sequences."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gristmill.errors import GroupError

if TYPE_CHECKING:
    from gristmill.policy_version import PolicyVersion

_HIGHEST_ID = np.iinfo(np.int32).max

Ids = abc.Sequence[int] | npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Sequence:
    """A prompt of P tokens and a completion of C tokens, with its score. `TrajectoryGroup.of` makes a group of these.

    Lists, tuples and numpy arrays are accepted. The values are checked when the group is made.
    """

    prompt: Ids
    """int[P]: token ids before the first sampled token. At least one, because no token predicts the first token."""
    completion: Ids
    """int[C]: token ids after the prompt. At least one."""
    logprobs: abc.Sequence[float] | npt.NDArray[np.floating[Any]]
    """float[C]: natural logarithms of the probabilities with which the completion's tokens were sampled, at the
    temperature of the sampling. At most 0. Values at tokens that `mask` leaves out are ignored."""
    reward: float
    """The weighted total, a finite number."""
    mask: abc.Sequence[bool] | npt.NDArray[np.bool_] | None = None
    """bool[C]: False for tokens that the model did not sample, such as the answer of a tool. None: all were sampled."""
    reward_parts: abc.Mapping[str, float | None] = field(default_factory=dict)
    """The unweighted value of each reward by its name; None if the reward skipped the sequence."""
    finish_reason: str = "stop"
    """ "stop", or "length" if the completion reached its longest length."""
    messages: abc.Sequence[abc.Mapping[str, Any]] | None = None
    """The conversation for readers of the run: plain JSON objects, each with a text `role`. It is not trained on."""
    versions: abc.Sequence[tuple[PolicyVersion | str, int, int]] | None = None
    """The weights of each span of the completion, if they changed during the generation: (version, start, end) for the
    tokens [start, end), such as ("1.20", 0, 5). None: the version of the group sampled the whole completion."""


def fields_of(sequences: abc.Sequence[Sequence]) -> dict[str, Any]:
    """Returns the fields of a TrajectoryGroup that come from its sequences, except `versions`.

    Raises GroupError `no_sequences`, `sequence_length`, `length_mismatch`, `not_token_ids`, `negative_token` or
    `not_finite`. `values["sequence"]` is the number of the sequence. The group itself checks the values.
    """
    if not sequences:
        raise GroupError("no_sequences", "a group needs at least one sequence")
    tokens, logprobs, masks = [], [], []
    for index, one in enumerate(sequences):
        prompt, completion = (_ids(index, name, getattr(one, name)) for name in ("prompt", "completion"))
        mask = _flat(index, "mask", np.ones(len(completion)) if one.mask is None else one.mask, len(completion))
        sampled = mask.astype(np.bool_)
        completion_logprobs = _flat(index, "logprobs", one.logprobs, len(completion)).astype(np.float32)
        tokens += [prompt, completion]
        logprobs += [np.zeros(len(prompt), np.float32), np.where(sampled, completion_logprobs, np.float32(0))]
        masks += [np.zeros(len(prompt), np.bool_), sampled]
    conversations = [one.messages for one in sequences]
    names = dict.fromkeys(name for one in sequences for name in one.reward_parts)
    return {
        "lengths": np.array([len(one.prompt) + len(one.completion) for one in sequences], np.int32),
        "tokens": np.concatenate(tokens),
        "logprobs": np.concatenate(logprobs),
        "mask": np.concatenate(masks),
        "rewards": np.array([_number(index, "rewards", one.reward) for index, one in enumerate(sequences)], np.float32),
        "reward_parts": {
            name: [
                None if (value := one.reward_parts.get(name)) is None else _number(index, "reward_parts", value)
                for index, one in enumerate(sequences)
            ]
            for name in names
        },
        "finish_reasons": [one.finish_reason for one in sequences],
        "messages": None
        if all(messages is None for messages in conversations)
        else [[dict(message) for message in messages or ()] for messages in conversations],
    }


def _ids(index: int, name: str, values: Ids) -> npt.NDArray[np.int32]:
    array = _array(values)
    if array.ndim == 1 and not len(array):
        raise GroupError("sequence_length", f"sequence {index}: its {name} has no tokens", sequence=index, field=name)
    if array.ndim != 1 or array.dtype.kind not in "iu" or int(array.max()) > _HIGHEST_ID:
        raise GroupError(
            "not_token_ids",
            f"sequence {index}: its {name} is not a list of token ids, which are whole numbers from 0 to {_HIGHEST_ID}",
            sequence=index,
            field=name,
        )
    if int(array.min()) < 0:
        raise GroupError("negative_token", f"sequence {index}: {name} has token id {int(array.min())}", sequence=index)
    return array.astype(np.int32)


def _flat(index: int, name: str, values: Any, wanted: int) -> npt.NDArray[Any]:
    array = _array(values)
    if array.shape != (wanted,):
        raise GroupError(
            "length_mismatch",
            f"sequence {index}: {name} has the shape {list(array.shape)} for a completion of {wanted} tokens",
            sequence=index,
            field=name,
        )
    return array


def _array(values: Any) -> npt.NDArray[Any]:
    """Returns the values as an array. Lists of different lengths become an array of two dimensions without values."""
    try:
        return np.asarray(values)
    except ValueError:
        return np.empty((0, 0))


def _number(index: int, name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise GroupError(
            "not_finite",
            f"sequence {index}: {name} holds a value that is not a finite number",
            sequence=index,
            field=name,
        ) from error
