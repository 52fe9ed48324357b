"""The API's server: uvicorn with bounds for connections, which apply before any token is read.

`python -m gristmill_api` starts it, with uvicorn's options (`--host`, `--port`, `--root-path`, ...).
"""

from __future__ import annotations

import asyncio
import functools
import os
import resource
import sys
from asyncio import Transport
from typing import Any, Final

import click
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gristmill import ConfigError

_HEAD_BYTES: Final = 64 * 1024
"""Largest head of a request that arrives in several parts."""
_DESCRIPTORS: Final = 65_536
"""Open files and connections, if the machine allows as many."""
_RESERVE: Final = 200
"""Descriptors for Redis, the archive, the page, and connections that are just being refused."""

_LEAST: Final = 256
"""Descriptors without which nearly every request would be refused."""


class Connection(HttpToolsProtocol):
    """A connection that is closed if the head of its first or next request does not arrive in time.

    Without it, half a request would keep its connection for ever. uvicorn bounds only the pause between two requests.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._in_body = False

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]  # As uvicorn.
        super().connection_made(transport)
        most = self.limit_concurrency
        if most is not None and len(self.connections) > most + _RESERVE // 2:
            transport.abort()  # There are not enough descriptors to wait for a request and refuse it.
        self._start_timer(_timeout())

    def data_received(self, data: bytes) -> None:
        was_in_body = self._in_body
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()  # The application waits for the body, or works on the answer.
            self._head_bytes = 0
            return
        if not was_in_body and not self._in_body:  # Else the rest of a body, whose request is answered.
            self._head_bytes += len(data)
        if self._head_bytes > _HEAD_BYTES:
            self.transport.abort()
        elif self._timer is None:
            self._start_timer(_timeout())

    def on_headers_complete(self) -> None:
        self._in_body = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_body = False
        if (
            self.cycle is not None and self.cycle.response_complete
        ):  # uvicorn starts its own timer for the next request only after a response.
            self._stop_timer()
            self._start_timer(self.timeout_keep_alive)
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _start_timer(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


@functools.cache
def _timeout() -> float:
    from gristmill_api.settings import Settings

    return Settings.read(os.environ).limits.request_timeout_s


def main() -> None:
    """Starts the API. Options of the command line override the options here."""
    descriptors = _raise_descriptors()
    options = {
        "--http": "gristmill_api.server:Connection",
        # Longer than clients keep an idle connection (aiohttp 15 s, nginx 60 s): a request that is sent while the
        # server closes the connection would be lost.
        "--timeout-keep-alive": "75",
        "--limit-concurrency": str(descriptors - _RESERVE),
    }
    given = [word for option in options.items() for word in option]
    words = ["gristmill_api.app:app", *given, *sys.argv[1:]]
    _parse(words)
    from gristmill_api.settings import Settings

    try:
        _check(descriptors)
        Settings.read(os.environ)
    except ConfigError as error:
        sys.exit(f"error [{error.code}] {error}")
    uvicorn.main(words, prog_name="gristmill_api")


def _parse(words: list[str]) -> None:
    """Ends the process for a wrong option and for --help, before the import of the application takes seconds."""
    try:
        uvicorn.main.make_context("gristmill_api", list(words))
    except click.exceptions.Exit as end:
        sys.exit(end.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)


def _check(descriptors: int) -> None:
    """Raises ConfigError if there are too few for connections."""
    if descriptors < _LEAST:
        raise ConfigError(
            "too_few_descriptors",
            f"this process may have {descriptors} open files and connections; the API needs {_LEAST}: raise the hard "
            "limit (`ulimit -Hn`; of a container --ulimit nofile)",
            descriptors=descriptors,
        )


def _raise_descriptors() -> int:
    """Raises the soft limit of descriptors to the hard limit, or to `_DESCRIPTORS`. Returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return _DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
