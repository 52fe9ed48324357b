"""The definition of secrets, and functions that keep secrets out of records, logs and files.

A value is secret in any of these cases:

- its name says so (`api_key`, `key`, `token`, `password`, `webhook`, ...);
- its type is pydantic's SecretStr;
- a configuration takes it from an environment variable, and does not say that it is plain (`${NAME:plain}`);
- it is the password in a URL, the value of a secret parameter of a URL, or in an `Authorization` or `Cookie` header.

After `remember` has received a value, `redact` masks the value wherever it occurs in a text.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from pydantic import BaseModel, SecretBytes, SecretStr

REDACTED = "***"
"""The text that replaces a secret."""

_SHORTEST = 8
"""Least number of characters of a remembered value. Shorter values would also match parts of ordinary words."""

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SECRET_WORDS = frozenset({
    "password", "passwd", "pwd", "passphrase", "secret", "secrets", "apikey", "credential", "credentials",
    "authorization", "bearer", "cookie", "cookies", "accesskey", "privatekey", "webhook", "webhooks",
    "creds", "cred", "dsn", "jwt", "sessionid", "passcode", "otp", "mnemonic", "csrf", "xsrf",
})  # fmt: skip
_LAST_WORDS = frozenset({"token", "pass", "auth", "pat", "pem", "sas", "sig", "signature"})
_TOGETHER = ("authconfig", "connectionstring", "connstr", "serviceaccount", "sessionid", "accountkey")
"""Words of secret names that are written together or apart."""
_QUERY_NAMES = frozenset({"code"})
"""Parameters of URLs that are secret there and nowhere else."""
_KEY_OF = frozenset({
    "api", "access", "secret", "private", "auth", "signing", "encryption", "service", "account", "ssh",
    "openai", "anthropic", "hf",
})  # fmt: skip
"""Owners of a `..._key` whose value is always a secret, never the name of a field."""
_KEY_NOT_SECRET = frozenset({
    "answer", "gold", "reference", "solution", "question", "prompt", "response", "completion", "choices", "label",
    "category", "text", "messages", "image", "audio", "video", "input", "output", "target", "score", "reward",
    "metric", "task", "sort", "group", "order", "partition", "join", "lookup", "index", "primary", "foreign", "unique",
    "public", "cache", "row", "column", "field", "id", "name", "map", "dict", "json", "str", "nested", "state",
    "missing", "unexpected",
})  # fmt: skip
"""Owners of a `..._key` that is not secret, because it selects a field or is public."""
_TOKEN_OF = frozenset({
    "eos", "bos", "pad", "unk", "sep", "cls", "mask", "eot", "eom", "stop", "start", "begin", "end", "special",
    "think", "thinking", "image", "audio", "video", "tool", "assistant", "user", "system", "next", "first",
    "last", "answer",
})  # fmt: skip
"""Owners of a `..._token` that is a piece of text and not a secret."""

_NUMBER = re.compile(r"(?<=[A-Za-z])_?[0-9]+$")
"""The number of a second secret, such as HF_TOKEN_2."""
_TOKEN_WORDS = frozenset(
    {
        "auth",
        "access",
        "api",
        "bearer",
        "refresh",
        "session",
        "id",
        "csrf",
        "xsrf",
        "github",
        "gitlab",
        "hf",
        "npm",
        "bot",
    }
)
"""Words that are written together with `token`."""

_PATHS = frozenset({"PWD"})
"""Variables of every shell that hold a path, although their names look secret."""

_FIELD_NAME = re.compile(r"[a-z]+(?:_[a-z]+)*")
_FLAG = re.compile(r"--?[A-Za-z][\w.-]*")
_ASSIGNMENT = re.compile(r"(-{0,2}([A-Za-z][\w.-]*)=)(.*)", re.DOTALL)
_USER_INFO = re.compile(
    r"(?<=://)(?:[^\s/?#'\"]+|[^\s/?#'\":@\[]*:(?!\d{1,5}[^\w@])(?!//)(?:[^\s'\":]|:(?!//)){1,256})(?=@)"
)
"""Second, a password with an unquoted slash. A port is not the beginning of a password. The match ends before
the next ://, so that it takes linear time."""
_HEADER = re.compile(r"\b([Bb]earer|BEARER|Basic)\s+[A-Za-z0-9._~+/=-]{8,}")
_NAMED_HEADER = re.compile(
    r"\b((?:proxy-)?authorization|x-api-key|api-key|x-auth-token)(['\"]?\s*[:=]\s*['\"]?)"
    r"((?:bearer|basic|token|negotiate|digest|apikey)\s+)?[^\s'\",;]{8,}",
    re.IGNORECASE,
)
_WEBHOOK = re.compile(
    r"(https?://(?:hooks\.[^\s/'\"]{1,255}/|[^\s/'\"]{1,255}/(?:[^\s'\"?]{0,512}?/)?(?:web)?hooks?/))[^\s'\"]+",
    re.IGNORECASE,
)
"""The bounds keep the time linear, as those of `_COOKIE` do, for a text that repeats the beginning of a secret."""
_ACCOUNT_KEY = re.compile(r"\b(AccountKey|SharedAccessKey|SharedAccessSignature|Password|Pwd)=[^;\s'\"]+")
_QUERY = re.compile(r"(?<=[?&#])([A-Za-z0-9_.%\[\]-]+)=[^&#\s'\"]+")
_COOKIE = re.compile(
    r"\b((?:set-)?cookie['\"]?\s*[:=]\s*['\"]?)[^\s=;,'\"]{1,256}=[^\s;'\"]*(?:;\s*[^\s=;,'\"]+(?:=[^\s;'\"]*)?)*",
    re.IGNORECASE,
)
"""Cookies of a request or an answer, with all their attributes."""


_MASKED = re.compile(
    r"^\*{3}$|://\*{3}@|[=/]\*{3}(?![\w*])|(?:\b(?:bearer|basic|token)|[:=]) ?['\"]?\*{3}(?![\w*])", re.IGNORECASE
)
"""The mask, where `redact` writes it."""


def is_secret(name: str) -> bool:
    """Returns whether values with this name are secret: `api_key`, `key`, `HF_TOKEN`, `--db-password`, `clientSecret`.

    Names of text tokens and their counts (`eos_token`, `max_tokens`, `token_ids`) are not secret. Names of keys that
    select a field (`answer_key`, `sort_key`) are not secret either. `PWD` is the current folder, not a password.
    """
    words = [word.lower() for word in _WORDS.findall(_NUMBER.sub("", name))]
    if len(words) == 1 and not name.isupper():  # `pass_1` and `token_2` are metrics or settings
        words = [word.lower() for word in _WORDS.findall(name)]
    if not words or name in _PATHS:
        return False
    *before, last = words
    owner = before[-1] if before else ""
    if any(one in "".join(words) for one in _TOGETHER):
        return True
    if not _SECRET_WORDS.isdisjoint(words) or any("password" in word for word in words):  # PGPASSWORD
        return True
    if last in ("key", "keys"):
        return owner not in _KEY_NOT_SECRET or name.isupper()  # SORT_KEY, in an environment
    if last == "tokens":
        return owner in _KEY_OF
    if last.endswith("token") and last.removesuffix("token") in _TOKEN_WORDS:  # AUTHTOKEN
        return True
    return last in _LAST_WORDS and owner not in _TOKEN_OF


def remember(value: str) -> None:
    """Makes `redact` mask this value in every text from now on. Ignores values shorter than 8 characters."""
    global _pattern
    if len(value) < _SHORTEST or value in _values:
        return
    with _lock:
        _values.add(value)
        longest_first = sorted(_values, key=len, reverse=True)
        _pattern = re.compile("|".join(map(re.escape, longest_first)))


def remember_secrets(settings: Any) -> None:
    """Remembers every secret in a tree of models, mappings and lists."""
    if isinstance(settings, SecretStr):
        remember(settings.get_secret_value())
    elif isinstance(settings, str):
        _remember_in_url(settings)
    elif isinstance(settings, BaseModel):
        for name in type(settings).model_fields:
            _remember_item(name, getattr(settings, name))
    elif isinstance(settings, Mapping):
        for name, value in settings.items():
            _remember_item(str(name), value)
    elif isinstance(settings, list | tuple):
        for _, value, secret in _words(settings):
            if secret and isinstance(value, str):
                remember(value)
            else:
                remember_secrets(value)


def redact(value: Any, name: str = "") -> Any:
    """Returns a copy with `***` instead of each secret. Searches mappings, lists and texts; None stays None.

    A list may be a command line: the words `--api-key KEY`, `--api-key=KEY` and `API_KEY=KEY` lose their values.

    `name`: the key of the value, if the key is known.
    """
    if value is not None and (is_secret(name) or isinstance(value, SecretStr | SecretBytes)):
        return REDACTED
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, Mapping):
        return {
            redact_text(key) if isinstance(key, str) else key: redact(item, str(key)) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_redact_word(*word) for word in _words(value)]
    return value


def redacted(value: Any, path: str = "") -> Iterator[str]:
    """Yields the path of each text that `redact` has masked: "judge.api_key". Other asterisks do not count."""
    if isinstance(value, str):
        if _MASKED.search(value):
            yield path
    elif isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, inner in items:
            yield from redacted(inner, f"{path}.{name}".lstrip("."))


def redact_text(text: str) -> str:
    """Masks remembered values, passwords and secret parameters in URLs, authorization headers and cookies in a text."""
    if _pattern is not None:
        text = _pattern.sub(REDACTED, text)
    if "://" in text:
        text = _USER_INFO.sub(REDACTED, text)
        text = _WEBHOOK.sub(rf"\1{REDACTED}", text)
    if "?" in text or "&" in text or "#" in text:
        text = _QUERY.sub(_query, text)
    if "earer" in text or "BEARER" in text or "Basic" in text:
        text = _HEADER.sub(rf"\1 {REDACTED}", text)
    if ":" in text or "=" in text:
        text = _NAMED_HEADER.sub(lambda found: f"{found[1]}{found[2]}{found[3] or ''}{REDACTED}", text)
        text = _COOKIE.sub(rf"\1{REDACTED}", text)
        text = _ACCOUNT_KEY.sub(rf"\1={REDACTED}", text)
    return text


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Returns a command line without secrets, as `redact` does."""
    redacted: list[str] = redact(arguments)
    return redacted


def _words(values: Sequence[Any]) -> Iterator[tuple[str, Any, bool]]:
    """Yields (prefix such as `--api_key=`, value, whether it is secret) for a list that may be a command line."""
    follows = False
    for value in values:
        if follows or not isinstance(value, str):
            yield "", value, follows
            follows = False
            continue
        assignment = _ASSIGNMENT.fullmatch(value)
        if assignment is not None and is_secret(assignment[2]):
            yield assignment[1], assignment[3], True
        else:
            yield "", value, False
            follows = _FLAG.fullmatch(value) is not None and is_secret(value)


def _redact_word(prefix: str, value: Any, secret: bool) -> Any:
    return f"{prefix}{REDACTED}" if secret else redact(value)


def _query(match: re.Match[str]) -> str:
    return f"{match[1]}={REDACTED}" if _is_secret_parameter(match[1]) else match[0]


def _is_secret_parameter(name: str) -> bool:
    name = unquote(name)
    return is_secret(name) or name.lower() in _QUERY_NAMES


def secrets_in_urls(text: str) -> set[str]:
    """Returns the passwords and the secret parameters of the URLs in a text, as they are there and unquoted."""
    secrets = [one[0].partition(":")[2] or one[0] for one in _USER_INFO.finditer(text)] if "://" in text else []
    if "?" in text or "#" in text:
        secrets += [one[0].partition("=")[2] for one in _QUERY.finditer(text) if _is_secret_parameter(one[1])]
    return {*secrets, *map(unquote, secrets)}


def _remember_in_url(text: str) -> None:
    """Remembers the secrets of the URLs in a text, which libraries log alone."""
    for value in secrets_in_urls(text):
        remember(value)


def _remember_all(value: Any) -> None:
    """Remembers every text in a value whose name is secret, such as the items of `api_keys`."""
    if isinstance(value, str):
        remember(value)
    elif isinstance(value, Mapping):
        for inner in value.values():
            _remember_all(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _remember_all(inner)


def _may_name_a_field(name: str) -> bool:
    """Returns whether the value of `name` may be a field's name (`key: question`), which texts use as a word."""
    *before, last = (word.lower() for word in _WORDS.findall(name))
    return last in ("key", "keys") and _KEY_OF.isdisjoint(before[-1:])


def _remember_item(name: str, value: Any) -> None:
    if isinstance(value, str) and is_secret(name):
        if not (_FIELD_NAME.fullmatch(value) and _may_name_a_field(name)):
            remember(value)
    elif is_secret(name) and isinstance(value, Mapping | list | tuple):
        _remember_all(value)
    else:
        remember_secrets(value)


_lock = threading.Lock()
_values: set[str] = set()
_pattern: re.Pattern[str] | None = None
