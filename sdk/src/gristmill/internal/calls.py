"""The parts of a call to the trajectory API that both clients share: headers, retries, errors, and bodies."""

from __future__ import annotations

import json
import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import msgspec

from gristmill.errors import ApiError, ApiUnreachable, ConfigError, ErrorCode
from gristmill.group import TrajectoryGroup
from gristmill.internal.backoff import Backoff, asked_pause
from gristmill.internal.redaction import redact_text
from gristmill.run import RunEvent

_LOG = logging.getLogger(__name__)
_TRANSIENT = frozenset({429, 502, 503, 504})
_BATCH = msgspec.msgpack.Decoder(list[bytes])
WORD_HEADER = "Gristmill-Word"
"""The header with the word of the caller's registrations."""
EVENTS_SILENCE = 30.0
"""Seconds. The API sends a line to each reader of events at least every 15 s."""


def headers(url: str, token: str | None, word: str | None = None) -> dict[str, str]:
    """Returns the headers of all requests. Raises ConfigError for a URL or a token that no request can have, and for a
    URL with a password, because logs contain URLs. Blanks around the token are left out: a file ends with a newline.

    `word`: of the caller's registrations; None: a random one.
    """
    check_api_url(url)
    token = token and token.strip()
    if token and not (token.isascii() and token.isprintable()):
        raise ConfigError("token_invalid", "the trajectory API's token has characters that no HTTP header can have")
    if "@" in url.partition("://")[2].partition("/")[0]:
        raise ConfigError(
            "password_in_url",
            "the trajectory API's URL holds a password; write it without, put the token into a file and name that "
            "in GRISTMILL_API_TOKEN_FILE (or pass token=).",
        )
    return {WORD_HEADER: word or new_word(), **({"Authorization": f"Bearer {token}"} if token else {})}


def check_api_url(url: str) -> str:
    """Returns `url`. Raises ConfigError unless it is an http or https URL with a host."""
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port of more than 65535
        is_url = False
    if not is_url:
        shown = redact_text(url)
        raise ConfigError(
            "api_url_invalid", f"{shown!r} is not the address of an API, such as http://127.0.0.1:8000", url=shown
        )
    return url


def run_path(*names: str) -> str:
    """Returns the path of a run or of a part of it, with quoted names. `names`: the run's id and the segments after it.

    Raises ApiError `bad_request` for a name that would change the path, because the call would concern something else.
    The API decodes a quoted "/" before it selects the route.
    """
    for name in names:
        if name in ("", ".", "..") or "/" in name:
            raise ApiError(ErrorCode.BAD_REQUEST, 422, f"{name!r} is not a valid name in the path of a request.")
    return "/".join(("/v1/runs", *(quote(name, safe="") for name in names)))


def new_word() -> str:
    """Returns a random word for the registrations of an environment. See `Client`."""
    return secrets.token_hex(16)


def is_answer(answer: httpx.Response) -> bool:
    """Returns whether the API answered without an error. A proxy in its place may answer with a page and 200."""
    return answer.is_success and not answer.headers.get("Content-Type", "").startswith("text/html")


class Retries:
    """The retries of one call: how long to wait before the next attempt, and when to give up."""

    def __init__(self, url: str, request: str, patience: float | Callable[[], float]) -> None:
        """`request`: method and path, for messages. `patience`: seconds, or a function that returns them."""
        self._url = url
        self._request = request
        self._patience = patience
        self._started = time.monotonic()
        self._backoff = Backoff(0.1, 3.0)
        self._logged = False

    def result(self, answer: httpx.Response) -> httpx.Response | None:
        """Returns the answer, or None if the error is transient. Raises ApiError for any other error."""
        if answer.status_code in _TRANSIENT:
            return None
        if is_answer(answer):
            return answer
        code, message, remedy = _problem(answer)
        raise ApiError(code, answer.status_code, message, remedy)

    def pause(self, failure: httpx.Response | httpx.TransportError) -> float:
        """Returns the seconds to wait before the next attempt. Raises ApiUnreachable if the patience has ended."""
        retry_after = 0.0
        if isinstance(failure, httpx.Response):
            problem = f"HTTP {failure.status_code}: {_problem(failure)[1]}"
            retry_after = asked_pause(failure.headers)
        else:
            problem = str(failure) or type(failure).__name__
        spent = time.monotonic() - self._started
        patience = self._patience() if callable(self._patience) else self._patience
        if spent >= patience:
            raise ApiUnreachable(
                "api_unreachable",
                f"the trajectory API at {self._url} did not answer {self._request} for {spent:.0f} s ({problem}); "
                "is it running, and Redis behind it?",
                url=self._url,
                request=self._request,
                problem=problem,
            )
        if not self._logged and spent > 1.0:
            _LOG.warning("trajectory API at %s: %s; trying on for up to %.0f s", self._url, problem, patience)
            self._logged = True
        return min(max(self._backoff.next(), retry_after), patience - spent)


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values with NaN and infinity as strings, because JSON has no numbers for them."""
    return {
        name: finite(value)
        if isinstance(value, Mapping)
        else str(value)
        if isinstance(value, float) and not math.isfinite(value)
        else value
        for name, value in values.items()
    }


def decode_batch(body: bytes) -> list[TrajectoryGroup]:
    """Decodes the answer to a lease. Raises GroupError for a group that is not valid."""
    return [TrajectoryGroup.decode(group) for group in _BATCH.decode(body)]


def decode_event(text: str) -> RunEvent | None:
    """Returns the event in a line of the stream of events, or None for another line."""
    name, _, value = text.partition(":")
    return RunEvent.model_validate(json.loads(value)) if name == "data" else None


def _problem(answer: httpx.Response) -> tuple[str, str, str]:
    """Returns code, message and remedy of an error. An error that is not the API's is UNEXPECTED."""
    try:
        body = answer.json()
        # A route at the API's root answers as Atropos' clients read it, without `error`.
        error = body["error"] if "error" in body else {"code": body["code"], "message": body["detail"]}
        return str(error["code"]), str(error["message"]), str(error.get("remedy", ""))
    except (ValueError, KeyError, TypeError):
        return ErrorCode.UNEXPECTED, f"{answer.request.url} answered {answer.status_code}: {answer.text[:200]}", ""
