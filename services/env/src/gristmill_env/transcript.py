"""One attempt, as the very tokens that were sent and sampled, with what is trained on marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gristmill_env.inference import Completion, LabelSpan
from gristmill_env.messages import Message, assistant
from gristmill_env.prompts import Prompt


@dataclass(frozen=True)
class Attempt:
    """One attempt at an item, at its end. C: tokens after the prompt, those between replies included."""

    prompt: Prompt
    token_ids: list[int]
    """[C]"""
    logprobs: list[float]
    """[C]: log-probability under the distribution a token was drawn from; 0 where the mask is False."""
    mask: list[bool]
    """[C]: True where the token was sampled and is trained on."""
    labels: list[LabelSpan]
    """The server's weight labels, by position in `token_ids`."""
    text: str
    """The last reply, special tokens left out, with what the prompt had begun of it (`Prompt.begun`)."""
    messages: tuple[Message, ...]
    """The whole conversation."""
    finish_reason: str
    """ "stop"; "length" when a reply was cut or no room was left; "turns" when the turns were used up."""
    replies: int
    sampled: int | None
    """Tokens sampled, trained on or not; None where a text server does not tell."""
    reward: float | None = None
    """What the environment gave; None when it gives none."""


class Transcript:
    """An attempt under way."""

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
        """What the prompt holds of the first reply."""
        return self._prompt.begun

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens so far, the prompt's first: what the model continues."""
        return (*self._prompt.token_ids, *self._token_ids)

    @property
    def last_token(self) -> int | None:
        """None where a text server gave no tokens."""
        return self._token_ids[-1] if self._token_ids else None

    def add_reply(self, completion: Completion, text: str) -> None:
        """The model's reply, as sampled. `text`: the reply in words, with what the prompt had begun of it."""
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
        """The last reply is not trained on."""
        start, end = self._last_reply
        self._mask[start:end] = [False] * (end - start)
        self._logprobs[start:end] = [0.0] * (end - start)

    def add_messages(self, messages: Sequence[Message], token_ids: Sequence[int]) -> None:
        """What the environment says. `token_ids`: with the end of the model's turn and the next generation marker."""
        self._token_ids += token_ids
        self._logprobs += [0.0] * len(token_ids)
        self._mask += [False] * len(token_ids)
        self.messages = (*self.messages, *messages)

    def add_reward(self, reward: float | None) -> None:
        if reward is not None:
            self._reward = reward + (self._reward or 0.0)

    def end(self, finish_reason: str) -> Attempt:
        """The attempt, done."""
        return Attempt(
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
