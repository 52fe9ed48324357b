"""Rollouts as the exact tokens that were sent and sampled, with a mask of the trained tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gristmill import SamplingParams
from gristmill_env.data import Item
from gristmill_env.inference import Completion, LabelSpan
from gristmill_env.messages import Message, assistant
from gristmill_env.rewards import Score
from gristmill_env.rollouts.prompts import Prompt


@dataclass(frozen=True)
class Rollout:
    """A finished rollout of an item. C: number of tokens after the prompt, including tokens between replies."""

    prompt: Prompt
    token_ids: list[int]
    """[C]"""
    logprobs: list[float]
    """[C]: log-probability under the distribution from which a token was drawn; 0 where the mask is False."""
    mask: list[bool]
    """[C]: True for tokens that were sampled and are trained on."""
    labels: list[LabelSpan]
    """The server's weight labels, by position in `token_ids`."""
    text: str
    """The last reply without special tokens, including its beginning in the prompt (`Prompt.begun`)."""
    messages: tuple[Message, ...]
    """The whole conversation."""
    finish_reason: str
    """ "stop"; "length" when a reply was truncated or no room was left; "turns" when the turns were used up."""
    replies: int
    sampled: int | None
    """Tokens sampled, trained on or not; None if a text server does not report the number."""
    reward: float | None = None
    """The sum of the environment's rewards; None if the environment gave no reward."""


class Transcript:
    """An unfinished rollout."""

    def __init__(self, prompt: Prompt) -> None:
        self.messages: tuple[Message, ...] = prompt.messages
        self._prompt = prompt
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._mask: list[bool] = []
        self._labels: list[LabelSpan] = []
        self._last_reply = (0, 0)
        self._replies = 0
        self._sampled: int | None = 0
        self._text = ""
        self._reward: float | None = None

    @property
    def begun(self) -> str:
        """The beginning of the first reply that is part of the prompt."""
        return self._prompt.begun

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens so far, including the prompt, for the model to continue."""
        return (*self._prompt.token_ids, *self._token_ids)

    @property
    def last_token(self) -> int | None:
        """The last token after the prompt; None if a text server returned no tokens."""
        return self._token_ids[-1] if self._token_ids else None

    def add_reply(self, completion: Completion, text: str) -> None:
        """Adds the model's reply, as sampled. `text`: the reply as text, including its beginning in the prompt."""
        start = len(self._token_ids)
        self._token_ids += completion.token_ids
        self._logprobs += completion.logprobs
        self._mask += [True] * len(completion.token_ids)
        self._labels += [LabelSpan(span.version, start + span.start, start + span.end) for span in completion.labels]
        self._last_reply = (start, len(self._token_ids))
        self._replies += 1
        more = completion.length
        self._sampled = None if self._sampled is None or more is None else self._sampled + more
        self._text = text
        self.messages = (*self.messages, assistant(text))

    def leave_out_reply(self) -> None:
        """Excludes the last reply from training."""
        start, end = self._last_reply
        self._mask[start:end] = [False] * (end - start)
        self._logprobs[start:end] = [0.0] * (end - start)

    def add_messages(self, messages: Sequence[Message], token_ids: Sequence[int]) -> None:
        """Adds the environment's messages. `token_ids`: includes the end of the turn and the next generation marker."""
        self._token_ids += token_ids
        self._logprobs += [0.0] * len(token_ids)
        self._mask += [False] * len(token_ids)
        self.messages = (*self.messages, *messages)

    def add_reward(self, reward: float | None) -> None:
        if reward is not None:
            self._reward = reward + (self._reward or 0.0)

    def end(self, finish_reason: str) -> Rollout:
        """Returns the finished rollout."""
        return Rollout(
            prompt=self._prompt,
            token_ids=self._token_ids,
            logprobs=self._logprobs,
            mask=self._mask,
            labels=self._labels,
            text=self._text,
            messages=self.messages,
            finish_reason=finish_reason,
            replies=self._replies,
            sampled=self._sampled,
            reward=self._reward,
        )


@dataclass(frozen=True)
class RolloutGroup:
    """The rollouts of one item and their scores, in the same order."""

    item: Item
    sampling: SamplingParams
    rollouts: list[Rollout]
    scores: list[Score]
    seconds: float
    """From the first request to the last score."""

    @property
    def prompt(self) -> Prompt:
        """The first rollout's prompt; the others have the same prompt if the environment gives them the same task."""
        return self.rollouts[0].prompt
