"""The format of saved groups: JSONL, one `SavedGroup` per line.

A line has all data for scoring its completions again, without a data set, model or tokenizer.
Readers ignore unknown keys; `format` increases when a key changes its meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from gristmill import SamplingParams
from gristmill_env.rewards import Score
from gristmill_env.rollouts.groups import Rollout, RolloutGroup, failures
from gristmill_env.settings.run import EnvConfig
from gristmill_env.values import is_storable

FORMAT = 1

Message = dict[str, Any]
"""A chat message in the form of chat templates: `role`, `content`, and other keys that a template uses."""


def content_of(message: Message) -> str:
    """Returns the text of a message: its content, or the text parts of its content."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
    return content if isinstance(content, str) else ""


class SavedCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """One completion and its scores."""

    text: str
    """The completion without the tokens that end a turn; for a conversation, its last message."""
    messages: list[Message] | None = None
    """All turns after the group's `messages`, if there is more than one answer; None: `text` is the answer."""
    tokens: int | None = None
    """Number of sampled tokens, if known."""
    token_ids: list[int] | None = None
    """All token ids after the prompt; None if the server returned no ids."""
    mask: list[bool] | None = None
    """True for tokens that are trained on; None: all."""
    logprobs: list[float] | None = None
    """Log-probability per token under the distribution it was drawn from; 0 where the mask is False."""
    finish_reason: str | None = None
    """ "stop"; "length" for a truncated completion; "turns" when the turns were used up; None if unknown."""
    episode_reward: float | None = None
    """Reward from the run's `environment`; None if the environment gave no reward, or if it is unknown."""
    scores: dict[str, float | None] = {}
    """Value of each reward, before its weight; null if the reward returned no value."""
    total: float | None = None
    """Sum of weight × value; null when no reward had a value, or one failed."""
    error: str | None = None
    """The failed reward and its error."""
    errors: dict[str, str] = {}
    """The error of each failed reward by the reward's name, also of those with weight 0."""

    @classmethod
    def of(cls, rollout: Rollout, score: Score, *, tokens: bool = True) -> SavedCompletion:
        """Creates the saved form of a scored rollout. `tokens`: with the token ids and their log-probabilities."""
        return cls(
            text=rollout.text,
            messages=_turns(rollout) if rollout.replies > 1 else None,
            tokens=rollout.sampled,
            token_ids=rollout.token_ids or None if tokens else None,
            mask=None if not tokens or all(rollout.mask) else rollout.mask,
            logprobs=rollout.logprobs or None if tokens else None,
            finish_reason=rollout.finish_reason,
            episode_reward=rollout.reward,
            scores=dict(score.parts),
            total=score.total,
            error=score.error,
            errors={failure.reward: failure.text for failure in score.failed.values()},
        )

    @property
    def sampled_ids(self) -> list[int] | None:
        """The tokens that are trained on; None if unknown."""
        if self.token_ids is None or self.mask is None:
            return self.token_ids
        return [token for token, trained in zip(self.token_ids, self.mask, strict=True) if trained]

    @property
    def truncated(self) -> bool:
        """Whether the completion was truncated for lack of room."""
        return self.finish_reason == "length"


class SavedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The completions of one prompt."""

    format: int = FORMAT
    run: str
    """Run id, or the configuration's name."""
    creation: str | None = None
    """`RunRecord.creation` of the training that the group belongs to; None: of no training."""
    model: str | None = None
    """The model's name at the server."""
    row: int | None = None
    """Row number in the run's order, which continues to count in later epochs."""
    index: int | None = None
    """Index into the data set."""
    prompt: str
    """The row's `prompt_field`."""
    prompt_text: str | None = None
    """The prompt as the model saw it, including the template."""
    prompt_token_ids: list[int] | None = None
    messages: list[Message] | None = None
    """The conversation that the completions answer; null if only tokens are known."""
    conversational: bool = False
    """Whether the row's own prompt is a list of messages."""
    answer: str | None = None
    """The row's `ground_truth_field`, else its `answer_field`."""
    columns: dict[str, Any] = {}
    """The row's columns that JSON can hold."""
    columns_left_out: list[str] = []
    """Columns of the row that JSON cannot hold: images, bytes, NaN, integers beyond 64 bits."""
    sampling: SamplingParams | None = None
    settings: dict[str, Any] | None = None
    """The settings behind the group: model, group size, data set, prompts, sampling, rewards and weights."""
    completions: list[SavedCompletion]
    failed: list[dict[str, str]] = []
    """The rollouts that failed and were left out of the group: `error`, a code, and `text`."""
    versions: list[str] = []
    """Labels of the weights that sampled the group ("1.20"); "default" for a server whose weights are not trained."""
    time: datetime | None = None
    """When the group was made."""

    @classmethod
    def of(
        cls, group: RolloutGroup, *, run: str, model: str, config: EnvConfig, creation: str | None = None
    ) -> SavedGroup:
        """Creates the saved form of a group. `model`: the model's name at the server."""
        item, prompt = group.item, group.prompt
        columns, left_out = json_columns(item.columns)
        return cls(
            run=run,
            creation=creation,
            model=model,
            row=item.row,
            index=item.index,
            prompt=item.prompt,
            prompt_text=prompt.text,
            prompt_token_ids=list(prompt.token_ids) or None,
            messages=[dict(message) for message in prompt.messages],
            conversational=item.conversation is not None,
            answer=item.answer,
            columns=columns,
            columns_left_out=left_out,
            sampling=group.sampling,
            settings=settings_of(config, model),
            completions=[
                SavedCompletion.of(rollout, score) for rollout, score in zip(group.rollouts, group.scores, strict=True)
            ],
            failed=failures(group.failed),
            versions=list(dict.fromkeys(span.version for rollout in group.rollouts for span in rollout.labels)),
            time=datetime.now(UTC),
        )

    @property
    def turns_known(self) -> bool:
        """Whether each `text` is the model's. Without messages, the text of several turns holds the environment's."""
        return self.messages is not None or all(c.mask is None or all(c.mask) for c in self.completions)

    @property
    def totals(self) -> list[float]:
        """Totals of the completions that have one."""
        return [completion.total for completion in self.completions if completion.total is not None]


def settings_of(config: EnvConfig, model: str) -> dict[str, Any]:
    """Returns the settings that define a group: the run's record without the settings that only training needs."""
    recorded = config.recorded(model)
    del recorded["trainer"], recorded["ensure_scores_are_not_same"]
    return {"group_size": config.group_size, **recorded}


def _turns(rollout: Rollout) -> list[Message]:
    return [dict(message) for message in rollout.messages[len(rollout.prompt.messages) :]]


def json_columns(row: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns the columns of a row that JSON can hold, and the names of the other columns."""
    kept = {name: value for name, value in row.items() if is_storable(value)}
    return kept, [name for name in row if name not in kept]
