"""Scores texts that are already there: the one place of the commands that knows how rewards are called."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gristmill_env.errors import SavedError
from gristmill_env.prepare import build_scorer
from gristmill_env.rewards import Reward, Sample, Score, Scorer
from gristmill_env.saved import SavedGroup
from gristmill_env.settings import DatasetConfig


async def score_samples(scorer: Scorer, samples: Sequence[Sample]) -> list[Score]:
    """One score a sample, in order; the samples are completions of one prompt."""
    return await asyncio.to_thread(lambda: [scorer.score(sample) for sample in samples])


async def score_group(scorer: Scorer, group: SavedGroup, answer_field: str | None) -> list[Score]:
    """The group's completions, scored anew.

    `answer_field`: column that holds the answer, where the group has it; else the answer that was saved counts.
    Raises SavedError when a reward needs what was not saved.
    """
    answer = group.answer
    if answer_field is not None and answer_field in group.columns:
        answer = str(group.columns[answer_field])
    place = "a saved group" if group.row is None else f"the saved group of row {group.row}"
    for weighted in scorer.rewards:
        reward = weighted.reward
        if compares_with_answer(reward) and answer is None:
            raise SavedError(
                f"reward '{reward.name}' compares with the row's answer, and {place} has none; "
                "give the run's --config, so that it can be looked up in the data set"
            )
        if _counts_tokens(reward) and any(completion.token_ids is None for completion in group.completions):
            raise SavedError(f"reward '{reward.name}' counts tokens, and {place} was saved without token ids")
    return await score_samples(
        scorer,
        [
            Sample(
                completion=completion.text,
                answer=answer,
                prompt=group.prompt,
                tokens=completion.token_ids or (),
                finish_reason=completion.finish_reason or "stop",
                row=group.columns,
            )
            for completion in group.completions
        ],
    )


def compares_with_answer(reward: Reward) -> bool:
    """Whether the reward asks for the row's answer."""
    return reward.needs_answer


def _counts_tokens(reward: Reward) -> bool:
    return "tokens" in reward.inputs


def scorer_of(config: DatasetConfig) -> Scorer:
    """The configured rewards, for groups that bring their answers themselves. Raises RewardError."""
    return build_scorer(config.model_copy(update={"answer_field": config.answer_field or "answer"}))
