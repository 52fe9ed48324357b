"""Makes saved groups (`gristmill.internal.saved`) of the groups and the unfinished rows of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from gristmill import SamplingParams
from gristmill.internal.saved import SavedCompletion, SavedGroup
from gristmill_env.data import Item
from gristmill_env.errors import EnvError
from gristmill_env.rewards import Score
from gristmill_env.rollouts.groups import Rollout, RolloutGroup, failures
from gristmill_env.rollouts.prompts import Prompt
from gristmill_env.settings.run import EnvConfig
from gristmill_env.values import is_storable


@dataclass
class Attempt:
    """What exists of a row's group so far. The content of a dropped group."""

    index: int
    """Index into the data set."""
    item: Item | None = None
    sampling: SamplingParams | None = None
    rollouts: Sequence[Rollout] = ()
    scores: Sequence[Score] = ()
    """One per rollout, or none."""
    failed: Sequence[EnvError] = ()
    """The errors of the rollouts that failed and were left out."""
    seconds: float | None = None
    source: str | None = None
    """Name of the row's source."""

    @classmethod
    def of(cls, group: RolloutGroup) -> Attempt:
        """Returns the parts of a whole group."""
        item = group.item
        return cls(
            item.index, item, group.sampling, group.rollouts, group.scores, group.failed, group.seconds, item.source
        )


def saved_group(
    attempt: Attempt,
    *,
    run: str,
    model: str,
    settings: dict[str, Any] | None,
    creation: str | None = None,
    tokens: bool = True,
) -> SavedGroup:
    """Returns the saved form of a row. `model`: the model's name at the server. `tokens`: with the token ids and their
    log-probabilities."""
    item = attempt.item
    prompt = attempt.rollouts[0].prompt if attempt.rollouts else None
    messages = prompt.messages if prompt is not None else () if item is None else item.messages
    tools = None if prompt is None else _tools(prompt)
    columns, left_out = ({}, []) if item is None else json_columns(item.columns)
    return SavedGroup(
        run=run,
        creation=creation,
        model=model,
        row=None if item is None else item.row,
        source=attempt.source,
        index=attempt.index,
        prompt="" if item is None else item.prompt,
        prompt_text=None if prompt is None else prompt.text,
        prompt_tokens=len(prompt.token_ids) or None if prompt is not None else None,
        prompt_token_ids=list(prompt.token_ids) or None if prompt is not None and tokens else None,
        messages=[dict(message) for message in messages] or None,
        tools=tools,
        conversational=item is not None and item.conversation is not None,
        answer=None if item is None else item.answer,
        columns=columns,
        columns_left_out=left_out,
        sampling=attempt.sampling,
        settings=settings,
        completions=[
            saved_completion(rollout, score, tools, tokens=tokens)
            for rollout, score in zip(
                attempt.rollouts, attempt.scores or [_UNSCORED] * len(attempt.rollouts), strict=True
            )
        ],
        failed=failures(attempt.failed),
        versions=_labels(attempt.rollouts),
        seconds=attempt.seconds,
        time=datetime.now(UTC),
    )


def saved_completion(
    rollout: Rollout, score: Score, tools: list[dict[str, Any]] | None, *, tokens: bool
) -> SavedCompletion:
    """Returns the saved form of a scored rollout. `tools`: the group's. `tokens`: with the token ids and their
    log-probabilities."""
    own = _tools(rollout.prompt)
    turns = rollout.messages[len(rollout.prompt.messages) :] if rollout.replies > 1 else None
    return SavedCompletion(
        text=rollout.text,
        messages=None if turns is None else [dict(message) for message in turns],
        tools=None if own == tools else own or [],
        tokens=rollout.sampled,
        token_ids=rollout.token_ids or None if tokens else None,
        mask=None if not tokens or all(rollout.mask) else rollout.mask,
        logprobs=rollout.logprobs or None if tokens else None,
        finish_reason=rollout.finish_reason,
        episode_reward=rollout.reward,
        episode_parts=dict(rollout.parts) or None,
        scores=dict(score.parts),
        total=score.total,
        error=score.error,
        errors=errors_of(score),
        versions=_labels([rollout]),
    )


def errors_of(score: Score) -> dict[str, str]:
    """Returns the error of each failed reward by the reward's name."""
    return {name: failure.text for name, failure in score.failed.items()}


def settings_of(config: EnvConfig, model: str) -> dict[str | None, dict[str, Any]]:
    """Returns the settings that define a group, by the group's source.

    They are the run's record without the settings that only training needs.
    """
    settings = {}
    for source, part in config.by_source().items():
        recorded = part.recorded(model)
        del recorded["trainer"], recorded["ensure_scores_are_not_same"]
        recorded.pop("curriculum", None)
        settings[source] = {"group_size": config.group_size, **recorded}
    return settings


def json_columns(row: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns the columns of a row that JSON can hold, and the names of the other columns."""
    storable = {name: value for name, value in row.items() if is_storable(value)}
    return storable, [name for name in row if name not in storable]


_UNSCORED = Score(None, {})


def _tools(prompt: Prompt) -> list[dict[str, Any]] | None:
    return [dict(tool) for tool in prompt.tools] or None


def _labels(rollouts: Sequence[Rollout]) -> list[str]:
    return list(dict.fromkeys(span.version for rollout in rollouts for span in rollout.labels))
