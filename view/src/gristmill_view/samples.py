"""A few completions of a run for people to read: the newest groups of a live API, as text."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gristmill.group import Tokenizer
from gristmill.internal import foreign
from gristmill.internal.logs import escaped
from gristmill.run import Example
from gristmill.sync_client import SyncClient
from gristmill_view import turns

_LOG = logging.getLogger(__name__)
_SPECIAL = re.compile(r"<[|｜][^|｜>\s]{1,40}[|｜]>|</?s>|<(?:start|end)_of_turn>|<(?:bos|eos|pad)>|\[/?INST\]")
_USER_TURNS = (
    ("<|im_start|>user\n", ("<|im_end|>",)),
    ("<|start_header_id|>user<|end_header_id|>", ("<|eot_id|>",)),
    ("<start_of_turn>user\n", ("<end_of_turn>",)),
    ("<|start|>user<|message|>", ("<|end|>",)),
    ("<｜User｜>", ("<｜Assistant｜>",)),
    ("<|user|>", ("<|end|>", "<|endoftext|>", "</s>", "<|assistant|>")),
    ("[INST]", ("[/INST]",)),
)
"""The texts around a message of the user in templates of Qwen, Llama 3, Gemma, gpt-oss, DeepSeek, Phi and Mistral."""
_READABLE = 4000
"""Characters of a prompt or a completion that a person can still read in a terminal."""


class Sample(NamedTuple):
    """One rollout of a group. Of several branches, the last."""

    group_id: str
    prompt: str
    """The last question if the template is known, else the prompt without special tokens."""
    completion: str
    reward: float
    parts: dict[str, float | None]
    finish_reason: str | None
    version: str | None


def read_tokenizer(file: Path | None) -> Any:
    """Returns the tokenizer in a tokenizer.json, or None.

    Logs a warning if the package `tokenizers` is missing or the file is not a tokenizer.
    """
    if file is None or not foreign.is_file(file):
        return None
    try:
        from tokenizers import Tokenizer as FastTokenizer
    except ImportError:
        _LOG.warning("tokens have no texts, because `tokenizers` is not installed: pip install './view[page]'")
        return None
    try:
        return FastTokenizer.from_buffer(foreign.read_file(file, foreign.TOKENIZER))
    except ValueError as error:
        _LOG.warning("tokens have no texts, because %s is not a tokenizer: %s", file, error)
        return None


def read_samples(client: SyncClient, run_id: str, tokenizer: Tokenizer | None, limit: int = 1) -> list[Sample]:
    """Returns the first rollout of each of the groups that were submitted last, the newest first. `limit`: 1 to 8.

    Raises ApiError and ApiUnreachable as the client does.
    """
    return [sample for example in client.examples(run_id, limit) for sample in samples_of(example, tokenizer)[:1]]


def samples_of(example: Example, tokenizer: Tokenizer | None) -> list[Sample]:
    """Returns the rollouts of one group."""
    if tokenizer is not None:
        texts: Sequence[tuple[str, str]] = [
            (question(text.prompt), text.completion) for text in example.texts(tokenizer)
        ]
    elif example.messages:
        texts = [_of_messages(messages) for messages in example.messages]
    else:
        texts = [("", " ".join(map(str, ids))) for ids in example.tokens]
    return [
        Sample(
            group_id=example.group_id,
            prompt=prompt,
            completion=completion,
            reward=example.rewards[place],
            parts={name: values[place] for name, values in example.reward_parts.items()},
            finish_reason=example.finish_reasons[place] if place < len(example.finish_reasons) else None,
            version=example.version,
        )
        for place in example.last_branches
        if place < len(texts)
        for prompt, completion in [texts[place]]
    ]


def question(prompt: str) -> str:
    """Returns the last message of the user in a rendered prompt, or the prompt without special tokens."""
    for start, ends in _USER_TURNS:
        _, begun, rest = prompt.rpartition(start)
        places = [place for end in ends if begun and (place := rest.find(end)) >= 0]
        if places:
            return rest[: min(places)].strip()
    return _SPECIAL.sub(" ", prompt).strip()


def one_line(text: str, longest: int = _READABLE) -> str:
    """Returns the text on one line, with control characters visible: a model's text must not control the terminal."""
    words = escaped(text.strip().replace("\n", " ⏎ "))
    return words if len(words) <= longest else f"{words[: longest - 1]}…"


def _of_messages(messages: Any) -> tuple[str, str]:
    if not isinstance(messages, list) or not messages:
        return "", str(messages)
    contents = list(map(_content, messages))
    return (contents[-2] if len(contents) > 1 else ""), contents[-1]


def _content(message: Any) -> str:
    """Returns the text of a message and its tool calls, `name(arguments)`."""
    if not isinstance(message, dict):
        return str(message)
    content = message.get("content")
    calls = [f"{call.name}({call.text})" for call in turns.tool_calls(message)]
    return "\n".join([*([] if content is None else [str(content)]), *calls])
