"""Scores completions without a run: `Reward.score`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import fields
from functools import cache
from typing import Any

from gristmill_env.errors import RewardError
from gristmill_env.rewards.inputs import PLURALS, Sample
from gristmill_env.rewards.outcomes import Failure
from gristmill_env.rewards.reward import Reward
from gristmill_env.rewards.scorer import Scorer, WeightedReward
from gristmill_env.running.daemon import loop_in_thread

_FIELDS = frozenset(one.name for one in fields(Sample)) - {"completion", "row"}


def score(reward: Reward, samples: Sequence[Sample]) -> list[float | None]:
    """Scores the samples as one group, on an event loop that all library calls share. Raises RewardError.

    A call in the code of a reward has another loop, because the first loop may wait for that code.
    """
    if not samples:
        return []
    names = tuple(dict.fromkeys(str(column) for sample in samples for column in sample.row))
    has_answer = any(sample.answer is not None for sample in samples)
    here = WeightedReward(reward.here(), 1.0)
    try:
        scorer = Scorer([here], has_answer=has_answer, columns=names)
    except RewardError as error:
        raise RewardError(
            error.code, f"{error} (In score(), give it by its name: score(completions, answer=...))", **error.values
        ) from error
    depth = _depth.get()
    token = _depth.set(depth + 1)  # the rewards' code inherits it
    try:
        results = asyncio.run_coroutine_threadsafe(scorer.outcomes(samples), _loop(depth)).result()
    finally:
        _depth.reset(token)
    values: list[float | None] = []
    for outcome in (outcomes[reward.name] for outcomes in results):
        if isinstance(outcome, Failure):
            raise outcome.raised() from outcome.cause
        values.append(outcome if isinstance(outcome, float) else None)
    return values


_depth: ContextVar[int] = ContextVar("depth", default=0)
"""How many calls of `score` this code is inside of."""


@cache
def _loop(depth: int) -> asyncio.AbstractEventLoop:
    return loop_in_thread("rewards")


os.register_at_fork(after_in_child=_loop.cache_clear)  # a forked child has none of its parent's threads


def samples_of(reward: str, completions: Sequence[str | Sample], inputs: Mapping[str, Any]) -> list[Sample]:
    """Returns the samples that `Reward.score` describes. Raises RewardError for inputs that do not fit."""
    if isinstance(completions, str):
        raise RewardError(
            "completions_not_a_list",
            f"reward '{reward}': score() takes a list of completions; write [completion]",
            reward=reward,
        )
    if any(isinstance(completion, Sample) for completion in completions):
        if inputs or not all(isinstance(completion, Sample) for completion in completions):
            raise RewardError(
                "samples_and_inputs",
                f"reward '{reward}': a Sample holds all inputs; give samples only, or texts and inputs",
                reward=reward,
            )
        return [completion for completion in completions if isinstance(completion, Sample)]
    samples = []
    for at, completion in enumerate(completions):
        if not isinstance(completion, str):
            raise RewardError(
                "completion_not_text",
                f"reward '{reward}': completion {at} is {completion!r:.60}; it must be text",
                reward=reward,
                at=at,
            )
        own = {_field(key): _of_completion(reward, key, value, at, len(completions)) for key, value in inputs.items()}
        row = {**own.pop("row", {}), **{key: own.pop(key) for key in [*own] if key not in _FIELDS}}
        samples.append(Sample(completion, row=row, **own))
    return samples


def _field(key: str) -> str:
    key = PLURALS.get(key, key)
    return "answer" if key == "ground_truth" else key


def _of_completion(reward: str, key: str, value: Any, at: int, size: int) -> Any:
    """Returns the item of one completion. A number given as an answer becomes text, because answers are text."""
    one_message_list = key == "messages" and isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)
    if isinstance(value, list) and not one_message_list:
        if len(value) != size:
            raise RewardError(
                "length_mismatch",
                f"reward '{reward}': {key} has {len(value)} items for {size} completions; a list holds one each, "
                'anything else is shared by all. (Share a list as a column: row={"name": [...]})',
                reward=reward,
                field=key,
            )
        value = value[at]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if number and _field(key) == "answer" else value
