"""The format of scored completions on disk: JSONL, one `SavedGroup` per line.

The environment writes it: the groups of `process` and `serve`, the groups that it drops, and the prompts of an
evaluation. A line has all data for scoring its completions again, without a data set, model or tokenizer. Readers
ignore unknown keys; `format` increases when a key changes its meaning.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Any, BinaryIO, Final

import msgspec

from gristmill.group import SamplingParams
from gristmill.internal.lines import decoded, whole_lines

FORMAT: Final = 1

Message = dict[str, Any]
"""A chat message in the form of chat templates: `role`, `content`, and other keys that a template uses."""

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Messages = Annotated[list[Message], msgspec.Meta(max_length=1 << 14)]


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
    messages: _Messages | None = None
    """All turns after the group's `messages`, if there is more than one answer; None: `text` is the answer."""
    tools: list[dict[str, Any]] | None = None
    """The tools of the completion's own prompt; None: the group's."""
    tokens: _Count | None = None
    """Number of sampled tokens, if known."""
    token_ids: list[int] | None = None
    """All token ids after the prompt; None if they are unknown or not saved."""
    mask: list[bool] | None = None
    """True for tokens that are trained on; None: all."""
    logprobs: list[float] | None = None
    """Log-probability per token under the distribution it was drawn from; 0 where the mask is False."""
    finish_reason: str | None = None
    """ "stop"; "length" for a truncated completion; "turns" when the turns were used up; "error" for a conversation in
    which the environment failed; None if unknown."""
    episode_reward: float | None = None
    """Reward from the run's `environment`; None if the environment gave no reward, or if it is unknown."""
    episode_parts: dict[str, float] | None = None
    """Named parts of that reward; None if it has no parts, or if they are unknown."""
    scores: dict[str, float | None] = {}
    """Value of each reward, before its weight; null if the reward returned no value or failed."""
    total: float | None = None
    """Sum of weight × value; null when no reward had a value, or one failed."""
    error: str | None = None
    """The first failed reward with a weight, and its error."""
    errors: dict[str, str] = {}
    """The error of each failed reward by the reward's name, also of those with weight 0. In an evaluation also
    "NAME.extract_answer", if the extraction of the answer failed."""
    right: bool | None = None
    """In an evaluation: the verdict of the correctness reward; None if it returned no value or failed."""
    extracted: str | None = None
    """In an evaluation: the final answer that the correctness reward finds, in a normal form; None: no answer."""
    versions: list[str] = []
    """Labels of the weights that sampled the completion, in order."""

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

    @property
    def turns(self) -> list[Message]:
        """The turns after the group's messages."""
        return list(self.messages or [{"role": "assistant", "content": self.text}])

    @property
    def why(self) -> str | None:
        """All errors of the completion as one text."""
        return "; ".join(f"{name}: {text}" for name, text in self.errors.items()) or self.error


class SavedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The completions of one prompt. A group without completions is a row that failed before it had any."""

    format: int = FORMAT
    run: str
    """Run id, or the configuration's name."""
    creation: str | None = None
    """`RunRecord.creation` of the training that the group belongs to; None: of no training."""
    group_id: str | None = None
    """Of a dropped group: its id."""
    creation_ms: int | None = None
    """Of a dropped group: the time of the run's creation, ms of Unix time."""
    env_id: str | None = None
    """Of a dropped group: its environment."""
    model: str | None = None
    """The model's name at the server."""
    row: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] | None = None
    """Row number in the run's order, which continues to count in later epochs; the prompt's number in an evaluation."""
    source: str | None = None
    """Name of the row's source, if the run has `sources`. Each source has its own rows and rewards."""
    index: _Count | None = None
    """Index into the data set."""
    prompt: str
    """The row's `prompt_field`."""
    prompt_text: str | None = None
    """The prompt as the model saw it, including the template."""
    prompt_tokens: _Count | None = None
    """Number of the prompt's tokens, if known."""
    prompt_token_ids: list[int] | None = None
    messages: _Messages | None = None
    """The conversation that the completions answer; null if only tokens are known."""
    tools: list[dict[str, Any]] | None = None
    """The tools that the chat template wrote into the prompt, in OpenAI's form; null: none, or unknown."""
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
    completions: Annotated[list[SavedCompletion], msgspec.Meta(max_length=1 << 14)]
    completions_left_out: int = 0
    """Completions that are not here, because they made the line too long."""
    failed: list[dict[str, str]] = []
    """The rollouts that failed and were left out of the group: `error`, a code, and `text`."""
    reason: str | None = None
    """Why the group was dropped, or why a prompt of an evaluation has no completions ("too_long", "bad_row")."""
    error: str | None = None
    """The error behind the reason."""
    versions: list[str] = []
    """Labels of the weights that sampled the group ("1.20"); "default" for a server whose weights are not trained."""
    seconds: float | None = None
    """From the first request to the last score."""
    time: datetime | None = None
    """When the group was made."""

    @property
    def turns_known(self) -> bool:
        """Whether each `text` is the model's. Without messages, the text of several turns holds the environment's."""
        return self.messages is not None or all(c.mask is None or all(c.mask) for c in self.completions)

    @property
    def totals(self) -> list[float]:
        """Totals of the completions that have one."""
        return [completion.total for completion in self.completions if completion.total is not None]


_GROUP: Final = msgspec.json.Decoder(SavedGroup)


def saved_groups(file: BinaryIO, start: int = 0) -> Iterator[SavedGroup]:
    """Yields the groups of a file from byte `start`. Leaves out torn lines and lines of another format."""
    for _, line in whole_lines(file, start):
        if (group := decoded(_GROUP, line)) is not None and group.format == FORMAT:
            yield group
