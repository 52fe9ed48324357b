"""Prompts as the model sees them: the chat template with the generation marker, as token ids."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gristmill_env.data import Message, assistant, refuse_half_characters, system, user
from gristmill_env.errors import PromptError
from gristmill_env.values import is_storable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_REPLY = f"\u2063{secrets.token_hex(8)}\u2063"
"""Marks the place of a reply or of a tool's result in a rendered conversation. No message contains it."""
_CLOSERS = (
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<|return|>", "<|call|>",
    "</s>", "<eos>", "<end_of_turn>", "<turn|>", "<|END_OF_TURN_TOKEN|>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
)  # fmt: skip
"""Tokens that end a turn or a text in today's models, in addition to the tokenizer's own end token."""
_OPENED_THOUGHT = re.compile(r"<think>\s*\Z")


@lru_cache(maxsize=2)
def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a path or hub id. Raises PromptError if it cannot be loaded."""
    from transformers import AutoTokenizer  # here: seconds to import, and mistakes before it should show at once

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        where = "in that folder" if Path(name).exists() else "locally, nor on the hub or in its cache"
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise PromptError("tokenizer_missing", f"no tokenizer '{name}' {where}: {reason}", name=name) from error
    return tokenizer


@dataclass(frozen=True)
class Prompt:
    """A prompt, ready to be sent."""

    text: str
    """The rendered template up to and including the generation marker, and the prefill."""
    token_ids: tuple[int, ...]
    """Empty if no tokenizer is known, as for a text server."""
    messages: tuple[Message, ...] = ()
    """The conversation that was rendered, the system prompt included."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The tools that the template received."""
    prefill: str = ""
    """The configured beginning of the reply, at the end of `text`."""
    begun: str = ""
    """All of `text` that belongs to the reply: a thought that the template opens, and the prefill."""


@dataclass(frozen=True)
class Continuation:
    """The tokens between a reply and the next reply, or of the whole conversation before the next reply."""

    token_ids: tuple[int, ...] = ()
    begun: str = ""
    """The end of their text, if it belongs to the next reply: a thought that the template opens."""
    whole: bool = False
    """Whether the tokens are those of the whole conversation, tokenized again."""


def opened_thought(text: str) -> str:
    """Returns the `<think>` with which a prompt ends; "" if it ends otherwise.

    The chat templates of R1, QwQ and Qwen3-Thinking write it into the generation prompt. The model then closes a
    thought that its own tokens never open.
    """
    match = _OPENED_THOUGHT.search(text)
    return match[0] if match else ""


class PromptBuilder:
    """Renders messages with a tokenizer's chat template, and reads completions back as text."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        system_prompt: str | None = None,
        prefill: str | None = None,
        *,
        thinking: bool | None = None,
        effort: str | None = None,
        template: str | None = None,
        values: Mapping[str, Any] | None = None,
    ) -> None:
        """`tokenizer`: None for a text server, which receives messages. `thinking` and `effort`: values of the
        template's switches (`enable_thinking` or `thinking`, `reasoning_effort`); None leaves them to the template.
        `template`: in place of the tokenizer's. `values`: more values for it."""
        self._tokenizer = tokenizer
        self._template: Any = template if template is not None or tokenizer is None else tokenizer.chat_template
        self._replaced = {} if template is None else {"chat_template": template}
        self._values = dict(values or {})
        named = {**self._replaced, "chat_template_kwargs": self._values}
        self.server_options: Mapping[str, Any] = {name: value for name, value in named.items() if value}
        """`chat_template` and `chat_template_kwargs` as far as they are set, for a server that renders messages."""
        self.system_prompt = system_prompt
        self.prefill = prefill or ""
        """Beginning of every first reply."""
        told = {"enable_thinking": thinking, "thinking": thinking, "reasoning_effort": effort}
        self._options: dict[str, Any] = {name: value for name, value in told.items() if value is not None}
        self._options |= self._values
        self._closers = frozenset[int]() if tokenizer is None else _closers(tokenizer)
        if tokenizer is not None and self._template is None:
            logger.warning("the tokenizer has no chat template; prompts are sent as plain text")

    def build(self, opening: str | Sequence[Message], options: Mapping[str, Any] | None = None) -> Prompt:
        """Returns the prompt of a conversation, or of one user message.

        `options`: more values for the template, such as `tools`. Raises PromptError when the template refuses the
        messages.
        """
        messages = (user(opening),) if isinstance(opening, str) else tuple(opening)
        if self.system_prompt and messages[0]["role"] != "system":
            messages = (system(self.system_prompt), *messages)
        _refuse_unstorable(messages)
        rendered = self._render(messages, options)
        text = rendered + self.prefill
        tools = tuple((options or {}).get("tools") or ())
        if self._tokenizer is None:
            return Prompt(text, (), messages, tools, self.prefill, self.prefill)
        # A template has already written the special tokens; a second BOS would shift the model's inputs.
        ids = self._tokenize(text, special=self._template is None)
        return Prompt(text, ids, messages, tools, self.prefill, opened_thought(rendered) + self.prefill)

    def continuation_tokens(
        self,
        said: Sequence[Message],
        more: Sequence[Message],
        last_token: int | None,
        options: Mapping[str, Any] | None = None,
        reply: Message | None = None,
    ) -> Continuation:
        """Returns the tokens between two replies: the end of the model's turn, `more`, the generation prompt.

        Some templates write `more` otherwise, or not at all, if the reply before has no tool calls. If the reply has
        some, returns the tokens of the whole conversation with such a template.

        `said`: the conversation before the reply. `last_token`: the reply's last token. If it ends the turn, the
        template's own end is left out, which may be another token (<|endoftext|> and <|im_end|>). The reply keeps the
        sampled tokens and is never tokenized again. `options`: more values for the template, such as `tools`.
        `reply`: as the model server parsed it. Raises PromptError when the template refuses the messages, or leaves the
        reply or a tool's result out.
        """
        if self._tokenizer is None:
            return Continuation()
        _refuse_unstorable(more)  # `said` was checked when it was new
        calls = None if reply is None else reply.get("tool_calls")
        try:
            _, marked, text = self._render((*said, assistant(_REPLY), *more), options).rpartition(_REPLY)
            if not marked:
                raise self._dropped("an earlier reply")
            ids = self._tokenize(text)
            closed = self._closed_by(ids, last_token)
            rest = text.removeprefix(self.decode(ids[:closed], special=True))
            if reply is None or not calls or self._continues(said, reply, more, rest, options):
                return Continuation(ids[closed:], opened_thought(text))
        except PromptError:
            if not calls:
                raise
        assert reply is not None
        text = self._render((*said, reply, *more), options)
        if not self._writes_results((*said, reply), more, options):
            raise self._dropped("a tool's result")
        return Continuation(self._tokenize(text), opened_thought(text), whole=True)

    def _continues(
        self,
        said: Sequence[Message],
        reply: Message,
        more: Sequence[Message],
        text: str,
        options: Mapping[str, Any] | None,
    ) -> bool:
        """Returns whether `text`, written after a reply without tool calls, also follows this reply with calls."""
        if not self._writes_results((*said, assistant(_REPLY)), more, options):
            return False
        try:
            return self._render((*said, reply, *more), options).endswith(text)
        except PromptError:  # for example calls whose arguments are not an object; `text` does not contain them
            return True

    def _writes_results(
        self, before: Sequence[Message], more: Sequence[Message], options: Mapping[str, Any] | None
    ) -> bool:
        """Returns whether the template writes the content of all tool results of `more`."""
        marks = {number: f"{_REPLY}{number};" for number, message in enumerate(more) if message["role"] == "tool"}
        marked = [{**one, "content": marks[n]} if n in marks else one for n, one in enumerate(more)]
        text = self._render((*before, *marked), options)
        return all(mark in text for mark in marks.values())

    def _dropped(self, part: str) -> PromptError:
        assert self._tokenizer is not None
        return PromptError(
            "chat_template_drops_replies",
            f"the chat template of {self._tokenizer.name_or_path} leaves out {part}, so that a conversation cannot be "
            "continued; use another template, or one turn",
            tokenizer=self._tokenizer.name_or_path,
        )

    def _closed_by(self, ids: Sequence[int], last_token: int | None) -> int:
        """Returns how many tokens the template writes to end a turn that `last_token` has ended already."""
        if ids[:1] == (last_token,):
            return 1
        if last_token not in self._closers:
            return 0
        for number, token in enumerate(ids[:3]):
            if token in self._closers:
                return number + 1
            if self.decode([token], special=True).strip():
                break
        return 0

    def without_end(self, token_ids: Sequence[int]) -> list[int]:
        """Returns the tokens without those at their end that end a turn or a text."""
        end = len(token_ids)
        while end and token_ids[end - 1] in self._closers:
            end -= 1
        return list(token_ids[:end])

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """Returns the text of a completion's tokens, without the tokens that end a turn or a text unless `special`.

        Other special tokens stay, because they are part of the answer: `[TOOL_CALLS]`, `<|python_tag|>`, `<think>`.
        """
        if self._tokenizer is None:
            raise PromptError("no_tokenizer", "no tokenizer is loaded that could read token ids")
        ids = list(token_ids) if special else [token for token in token_ids if token not in self._closers]
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @property
    def options(self) -> Mapping[str, Any]:
        """The run's values of the template's switches."""
        return self._options

    @property
    def has_tokenizer(self) -> bool:
        """Whether prompts are rendered and tokenized here."""
        return self._tokenizer is not None

    @property
    def special_tokens(self) -> frozenset[str]:
        """The texts that the tokenizer reads as control tokens."""
        if self._tokenizer is None:
            return frozenset()
        added = self._tokenizer.added_tokens_decoder.values()
        return frozenset(self._tokenizer.all_special_tokens) | {token.content for token in added if token.special}

    def unread_switches(self) -> list[str]:
        """Returns the settings of thinking and the values that the template does not read, so that they change nothing.

        Raises PromptError when the template refuses a short prompt.
        """
        if self._tokenizer is None or not self._options:
            return []
        opening = [user("Hi")]
        # The words that may be variables: not an attribute, and not the first word of a text.
        words = set(re.findall(r"\w+", re.sub(r"[.'\"]\w+", " ", str(self._template))))
        unread = [f"chat_template_kwargs.{name}" for name in self._values if name not in words]
        options = self._options.keys() - self._values.keys()
        if "thinking" in options and "reasoning_effort" not in options:  # an effort implies thinking
            both = [self._render(opening, {"thinking": on, "enable_thinking": on}) for on in (True, False)]
            unread += ["thinking_mode"] if both[0] == both[1] else []
        if "reasoning_effort" in options:
            efforts = {"low", "high", self._options["reasoning_effort"]}
            texts = {
                self._render(opening, {"reasoning_effort": effort, "thinking": on, "enable_thinking": on})
                for effort, on in ((effort, effort != "none") for effort in efforts)  # an effort implies thinking
            }
            unread += ["reasoning_effort"] if len(texts) == 1 else []
        return unread

    def _tokenize(self, text: str, *, special: bool = False) -> tuple[int, ...]:
        """Returns the tokens of a text. `special`: with the tokens that the tokenizer adds to plain text."""
        assert self._tokenizer is not None
        try:
            return tuple(self._tokenizer(text, add_special_tokens=special)["input_ids"])
        except (TypeError, ValueError, OverflowError) as error:
            raise PromptError(
                "prompt_not_tokenized",
                f"the tokenizer {self._tokenizer.name_or_path} refuses the prompt {text!r:.60}: {error}",
                tokenizer=self._tokenizer.name_or_path,
            ) from error

    def _render(self, messages: Sequence[Message], options: Mapping[str, Any] | None = None) -> str:
        """Returns the rendered conversation. `options`: override the run's values of the template's switches."""
        if self._tokenizer is None or self._template is None:
            return "\n\n".join(str(message["content"]) for message in messages)
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tokenize=False,
                    add_generation_prompt=True,
                    **{**self._replaced, **self._options, **(options or {})},
                )
            )
        except Exception as error:  # a template calls methods of any value, with any error
            remedy = ""
            if self.system_prompt and messages and messages[0]["role"] == "system":
                remedy = ". If it takes no system message, leave system_prompt out, or put it into prompt_template"
            raise PromptError(
                "chat_template_failed",
                f"the chat template of {self._tokenizer.name_or_path} refuses the prompt: {error}{remedy}",
                tokenizer=self._tokenizer.name_or_path,
            ) from error


def _refuse_unstorable(messages: Sequence[Message]) -> None:
    """Raises PromptError for half of a surrogate pair, and for a value that JSON cannot hold."""
    refuse_half_characters(messages)
    for number, message in enumerate(messages):
        if not is_storable(message):
            raise PromptError(
                "not_a_message",
                f"message {number + 1} holds a value that JSON cannot hold: {message!r:.80}; write it as text",
                message=number,
            )


def _closers(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Returns the tokens that end a turn or a text, or that begin or fill a text. No answer consists of them."""
    vocabulary = tokenizer.get_vocab()
    known = {vocabulary[token] for token in _CLOSERS if token in vocabulary}
    own = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}
    return frozenset({token for token in own if token is not None} | known)
