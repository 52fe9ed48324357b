"""Prompts as the model sees them: the chat template with the generation marker, as token ids."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2

from gristmill_env.errors import PromptError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """A prompt, ready to be sent."""

    text: str
    """Template and all, up to and including the marker after which the model answers."""
    token_ids: tuple[int, ...]
    """Empty where no tokenizer is known, as for a text server."""
    messages: tuple[dict[str, str], ...] = ()
    """The same as chat messages, for a server that applies the template itself."""


class PromptBuilder:
    """Renders messages with a tokenizer's chat template, and reads completions back as text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, system_prompt: str | None = None) -> None:
        """`tokenizer`: None for a text server, which is sent messages."""
        self._tokenizer = tokenizer
        self._system_prompt = system_prompt
        if tokenizer is not None and tokenizer.chat_template is None:
            logger.warning("the tokenizer has no chat template; prompts are sent as plain text")

    @classmethod
    def load(cls, name: str, system_prompt: str | None = None) -> PromptBuilder:
        """Load the tokenizer of a path or hub id. Raises PromptError when there is none."""
        from transformers import AutoTokenizer  # here: seconds to import, and mistakes before it should show at once

        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            where = "in that folder" if Path(name).exists() else "locally, nor on the hub or in its cache"
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise PromptError(f"no tokenizer '{name}' {where}: {reason}") from error
        return cls(tokenizer, system_prompt)

    def build(self, question: str) -> Prompt:
        """The prompt of one user message. Raises PromptError when the template refuses the messages."""
        messages = [{"role": "user", "content": question}]
        if self._system_prompt:
            messages.insert(0, {"role": "system", "content": self._system_prompt})
        if self._tokenizer is None or self._tokenizer.chat_template is None:
            text = "\n\n".join(message["content"] for message in messages)
            token_ids = () if self._tokenizer is None else tuple(self._tokenizer(text)["input_ids"])
            return Prompt(text, token_ids, tuple(messages))
        try:
            text = str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except jinja2.TemplateError as error:
            raise PromptError(
                f"the chat template of {self._tokenizer.name_or_path} refuses the prompt: {error}"
            ) from error
        # The template has already written the special tokens; a second BOS would shift the model's inputs.
        token_ids = tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        return Prompt(text, token_ids, tuple(messages))

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """Text of a completion's tokens, without special tokens unless `special`."""
        assert self._tokenizer is not None, "a text server's completions are text already"
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        )
