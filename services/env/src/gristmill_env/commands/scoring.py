"""Scores existing texts: the only module of the commands that calls rewards."""

from __future__ import annotations

import contextlib

from gristmill_env.data.dataset import NoFieldError, lookup
from gristmill_env.errors import SavedError
from gristmill_env.prompts import opened_thought
from gristmill_env.rewards import Sample, Score, Scorer
from gristmill_env.saved import SavedGroup


async def score_group(scorer: Scorer, group: SavedGroup, answer_field: str | None) -> list[Score]:
    """Scores the group's completions again.

    `answer_field`: field of the row that holds the answer, if the group has that field; otherwise the saved answer is
    used. Raises SavedError when a reward needs data that was not saved.
    """
    answer = group.answer
    if answer_field is not None:
        # Missing field: the column could not be saved, or is of another data set. The saved answer is the row's.
        with contextlib.suppress(NoFieldError):
            answer = str(lookup(group.columns, answer_field))
    place = "a saved group" if group.row is None else f"the saved group of row {group.row}"
    for weighted in scorer.rewards:
        reward = weighted.reward
        if reward.compares and answer is None:
            raise SavedError(
                "answer_not_saved",
                f"reward '{reward.name}' compares with the row's answer, and {place} has none; "
                "give the run's --config, so that it can be looked up in the data set",
                reward=reward.name,
                row=group.row,
            )
        if "tokens" in reward.asks_for and any(completion.token_ids is None for completion in group.completions):
            raise SavedError(
                "token_ids_not_saved",
                f"reward '{reward.name}' counts tokens, and {place} was saved without token ids",
                reward=reward.name,
                row=group.row,
            )
        if "episode_reward" in reward.asks_for and all(c.episode_reward is None for c in group.completions):
            raise SavedError(
                "episode_reward_not_saved",
                f"reward '{reward.name}' is what the environment gave, and {place} does not have it",
                reward=reward.name,
                row=group.row,
            )
    messages = group.messages or []
    # The reply of a group that was archived as tokens lacks the <think> with which the prompt ends.
    begun = opened_thought(group.prompt_text or "") if group.messages is None else ""
    texts = [begun + completion.text for completion in group.completions]
    return await scorer.score(
        [
            Sample(
                completion=text,
                answer=answer,
                prompt=group.prompt,
                tokens=completion.sampled_ids,
                finish_reason=completion.finish_reason or "stop",
                row=group.columns,
                messages=messages,
                conversation=[*messages, *(completion.messages or [{"role": "assistant", "content": text}])],
                episode_reward=completion.episode_reward,
                conversational=group.conversational,
            )
            for completion, text in zip(group.completions, texts, strict=True)
        ],
    )
