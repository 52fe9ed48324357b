"""The one rule for what is secret, and for keeping it out of records, logs and files.

A value is secret because of the name it stands under (`api_key`, `token`, `password`, ...), because of its type
(pydantic's SecretStr), because it came from an environment variable with such a name, or because it is the password in
a URL. A value can also be found wherever it occurs in a text: `remember` it once, and `redact` masks it from then on.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, SecretBytes, SecretStr

REDACTED = "***"
"""Written in the place of a secret."""

_SHORTEST = 8
"""Characters. A shorter value is not searched for in texts: it would be found in words that are no secret."""

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SECRET_WORDS = frozenset({
    "password", "passwd", "pwd", "passphrase", "secret", "secrets", "apikey", "credential", "credentials",
    "authorization", "bearer", "cookie", "cookies", "accesskey", "privatekey",
})  # fmt: skip
_LAST_WORDS = frozenset({"token", "pass", "auth", "pat"})
_KEY_OF = frozenset({
    "api", "access", "secret", "private", "auth", "signing", "encryption", "service", "account", "ssh",
    "openai", "anthropic", "hf",
})  # fmt: skip
"""What a `..._key` belongs to if it is secret. An `answer_key` or a `sort_key` is not."""
_TOKEN_OF = frozenset({
    "eos", "bos", "pad", "unk", "sep", "cls", "mask", "eot", "eom", "stop", "start", "begin", "end", "special",
    "think", "thinking", "image", "audio", "video", "tool", "assistant", "user", "system", "next", "first",
    "last", "answer",
})  # fmt: skip
"""What a `..._token` belongs to if it is a piece of text."""

_USER_INFO = re.compile(r"(?<=://)[^\s/@'\"]+(?=@)")
_HEADER = re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9._~+/=-]{8,}")
_QUERY = re.compile(r"(?<=[?&])([A-Za-z0-9_.-]+)=[^&#\s'\"]+")


def is_secret(name: str) -> bool:
    """Whether what stands under this name is a secret: `api_key`, `HF_TOKEN`, `--db-password`, `clientSecret`.

    Names of text tokens and their counts (`eos_token`, `max_tokens`, `token_ids`) are not secret.
    """
    words = [word.lower() for word in _WORDS.findall(name)]
    if not words:
        return False
    *before, last = words
    owner = before[-1] if before else ""
    if not _SECRET_WORDS.isdisjoint(words) or any("password" in word for word in words):  # PGPASSWORD
        return True
    if last in ("key", "keys"):
        return owner in _KEY_OF or (bool(before) and name.isupper())  # MODEL_KEY, in an environment
    if last == "tokens":
        return owner in _KEY_OF
    return last in _LAST_WORDS and owner not in _TOKEN_OF


def remember(value: str) -> None:
    """Mask this value wherever `redact` finds it from now on. Values shorter than 8 characters are ignored."""
    global _pattern
    if len(value) < _SHORTEST or value in _values:
        return
    with _lock:
        _values.add(value)
        longest_first = sorted(_values, key=len, reverse=True)
        _pattern = re.compile("|".join(map(re.escape, longest_first)))


def remember_secrets(settings: Any) -> None:
    """`remember` every secret in a tree of models, mappings and lists."""
    if isinstance(settings, SecretStr):
        remember(settings.get_secret_value())
    elif isinstance(settings, BaseModel):
        for name in type(settings).model_fields:
            _remember_item(name, getattr(settings, name))
    elif isinstance(settings, Mapping):
        for name, value in settings.items():
            _remember_item(str(name), value)
    elif isinstance(settings, list | tuple):
        for value in settings:
            remember_secrets(value)


def redact(value: Any, name: str = "") -> Any:
    """A copy without secrets, in which each is `***`. Mappings, lists and texts are looked through; None stays None.

    `name`: what the value stands under, if that is known.
    """
    if value is not None and (is_secret(name) or isinstance(value, SecretStr | SecretBytes)):
        return REDACTED
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, Mapping):
        return {key: redact(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item) for item in value]
    return value


def redact_text(text: str) -> str:
    """The text without remembered values, passwords in URLs, secret query parameters and authorization headers."""
    if _pattern is not None:
        text = _pattern.sub(REDACTED, text)
    if "://" in text:
        text = _USER_INFO.sub(REDACTED, text)
    if "=" in text:
        text = _QUERY.sub(_query, text)
    return _HEADER.sub(rf"\1 {REDACTED}", text)


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line without secrets: `--api_key KEY` and `--api_key=KEY` lose their values."""
    shown: list[str] = []
    hide = False
    for argument in arguments:
        flag, equals, _ = argument.partition("=")
        if flag.startswith("-") and is_secret(flag):
            shown.append(f"{flag}={REDACTED}" if equals else flag)
            hide = not equals
        else:
            shown.append(REDACTED if hide else redact_text(argument))
            hide = False
    return shown


def _query(match: re.Match[str]) -> str:
    return f"{match[1]}={REDACTED}" if is_secret(match[1]) else match[0]


def _remember_item(name: str, value: Any) -> None:
    if isinstance(value, str) and is_secret(name):
        remember(value)
    else:
        remember_secrets(value)


_lock = threading.Lock()
_values: set[str] = set()
_pattern: re.Pattern[str] | None = None
