"""The format of saved groups: JSONL, one `SavedGroup` a line.

A line has all that its completions can be scored with again: no data set, model or tokenizer is needed for it.
Readers ignore keys that they do not know; `format` goes up when a key changes its meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from gristmill import SamplingParams
from gristmill_env.rollout import Rollout
from gristmill_env.settings import EnvConfig
from gristmill_env.transcript import Attempt

FORMAT = 1

Message = dict[str, Any]
"""A chat message as chat templates take it: `role`, `content`, and whatever else a template knows."""


def content_of(message: Message) -> str:
    """Text of a message: its content, or the text parts of it."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
    return content if isinstance(content, str) else ""


class SavedCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """One completion and what it scored."""

    text: str
    """Special tokens left out; of a conversation, its last message."""
    messages: list[Message] | None = None
    """All turns after the group's `messages`, where there are more than one answer; None: `text` is the answer."""
    tokens: int | None = None
    """How many were sampled, where that is known."""
    token_ids: list[int] | None = None
    """All after the prompt; None where the server returned none."""
    mask: list[bool] | None = None
    """Which of them are trained on; None: all."""
    logprobs: list[float] | None = None
    """One a token: log-probability under the distribution it was drawn from; 0 where the mask is False."""
    finish_reason: str | None = None
    """ "stop"; "length" when it was cut; "turns" when the turns were used up; None where nobody knows any more."""
    episode_reward: float | None = None
    """What the run's `environment` gave; None when it gives none, or nobody knows any more."""
    scores: dict[str, float | None] = {}
    """Value of each reward, before its weight; null where it said nothing."""
    total: float | None = None
    """Sum of weight × value; null when no reward had a value, or one failed."""
    error: str | None = None
    """The reward that failed, and how."""

    @property
    def sampled_ids(self) -> list[int] | None:
        """The tokens that are trained on; None where they are not known."""
        if self.token_ids is None or self.mask is None:
            return self.token_ids
        return [token for token, trained in zip(self.token_ids, self.mask, strict=True) if trained]

    @property
    def cut(self) -> bool:
        """Whether it ended because there was no more room."""
        return self.finish_reason == "length"


class SavedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The completions of one prompt."""

    format: int = FORMAT
    run: str
    """Run id, or the configuration's name."""
    model: str | None = None
    """As the server calls it."""
    row: int | None = None
    """Row number in the run's order, counted on through the epochs."""
    index: int | None = None
    """Index into the data set."""
    prompt: str
    """The row's `prompt_field`."""
    prompt_text: str | None = None
    """The prompt as the model saw it, template and all."""
    prompt_token_ids: list[int] | None = None
    messages: list[Message] | None = None
    """The conversation that the completions answer; null where only tokens are known."""
    conversational: bool = False
    """Whether the row's own prompt is a list of messages."""
    answer: str | None = None
    """The row's `ground_truth_field`, else its `answer_field`."""
    columns: dict[str, Any] = {}
    """The whole row, as far as JSON can hold it."""
    columns_left_out: list[str] = []
    """Columns of the row that JSON cannot hold: images, bytes."""
    sampling: SamplingParams | None = None
    settings: dict[str, Any] | None = None
    """What made the group: model, group size, data set, prompts, sampling, rewards and weights."""
    completions: list[SavedCompletion]
    versions: list[str] = []
    """Labels of the weights that sampled it ("1.20"); "default" for a server that nobody trains."""
    time: datetime | None = None
    """When it was made."""

    @classmethod
    def of(cls, rollout: Rollout, *, run: str, model: str, config: EnvConfig) -> SavedGroup:
        """What is kept of a rollout. `model`: as the server calls it."""
        item, prompt = rollout.item, rollout.prompt
        columns, left_out = json_columns(item.columns)
        return cls(
            run=run,
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
            sampling=rollout.sampling,
            settings=settings_of(config, model),
            completions=[
                SavedCompletion(
                    text=attempt.text,
                    messages=_turns(attempt) if attempt.replies > 1 else None,
                    tokens=attempt.sampled,
                    token_ids=attempt.token_ids or None,
                    mask=None if all(attempt.mask) else attempt.mask,
                    logprobs=attempt.logprobs or None,
                    finish_reason=attempt.finish_reason,
                    episode_reward=attempt.reward,
                    scores=dict(score.parts),
                    total=score.total,
                    error=score.error,
                )
                for attempt, score in zip(rollout.attempts, rollout.scores, strict=True)
            ],
            versions=list(dict.fromkeys(span.version for attempt in rollout.attempts for span in attempt.labels)),
            time=datetime.now(UTC),
        )

    @property
    def totals(self) -> list[float]:
        """Totals of the completions that have one."""
        return [completion.total for completion in self.completions if completion.total is not None]


def settings_of(config: EnvConfig, model: str) -> dict[str, Any]:
    """What makes a group this group: the run's record without what only training needs."""
    recorded = config.recorded(model)
    del recorded["trainer"], recorded["ensure_scores_are_not_same"]
    return {"group_size": config.group_size, **recorded}


def _turns(attempt: Attempt) -> list[Message]:
    return [dict(message) for message in attempt.messages[len(attempt.prompt.messages) :]]


def json_columns(row: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The columns of a row that JSON can hold, and the names of the others."""
    kept = {name: value for name, value in row.items() if _is_json(value)}
    return kept, [name for name in row if name not in kept]


def _is_json(value: object) -> bool:
    if value is None or isinstance(value, str | int | float | bool):
        return True
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_json(inner) for key, inner in value.items())
    return isinstance(value, list | tuple) and all(map(_is_json, value))
