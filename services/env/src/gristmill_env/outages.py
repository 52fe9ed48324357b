"""Errors of a user's code that may pass, and the waiting for their end: a judge, a tool or a sandbox that is away.

One rule for all of them. An error that may pass is waited for up to `patience`. If the service answered other calls
meanwhile, the error is of one row. If it answered none, the error ends the run.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from gristmill.internal.backoff import Backoff
from gristmill.internal.redaction import redact_text
from gristmill_env.errors import EnvError

logger = logging.getLogger(__name__)

_OF_CONNECTIONS = frozenset({"TransportError", "ClientConnectionError", "APIConnectionError"})
"""Base classes of httpx, aiohttp and OpenAI's client that are not an OSError. No package is imported for its names."""
_OF_A_MISTAKE = frozenset({"UnsupportedProtocol", "LocalProtocolError"})
"""Subclasses of these that do not pass: the address or the request is wrong."""
_OF_FILES = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
_SHORTAGES = frozenset(
    {
        *(errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE),
        *(errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.ENOBUFS),
    }
)
"""Numbers of the operating system's errors that are not of one call's arguments, such as a path that is too long."""


def may_pass(error: BaseException | None) -> bool:
    """Returns whether an error, or an error behind it, is of a service that may answer later.

    These are HTTP status 408, 429 and 5xx, failed connections, time-outs, and a lack of memory, disk or files.
    """
    return any(_passes(one) for one in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting.append(one.__cause__ if one.__suppress_context__ or one.__cause__ else one.__context__)
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions


def _passes(error: BaseException) -> bool:
    if isinstance(error, EnvError):
        return error.may_pass
    if not isinstance(error, Exception):
        return False
    if (status := _status(error)) is not None:
        return status in (408, 429) or status >= 500
    names = {kind.__name__ for kind in type(error).__mro__}
    if not names.isdisjoint(_OF_CONNECTIONS):
        return names.isdisjoint(_OF_A_MISTAKE)
    if not isinstance(error, OSError) or isinstance(error, (*_OF_FILES, ValueError)):
        return False
    if isinstance(error, socket.gaierror):
        return error.errno == socket.EAI_AGAIN
    return isinstance(error, ConnectionError | TimeoutError | ssl.SSLError) or error.errno in (None, *_SHORTAGES)


def _status(error: BaseException) -> int | None:
    """Returns the HTTP status that an error of any client holds: httpx, requests, aiohttp, urllib, OpenAI."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status_code", "status", "code"):
            value = getattr(holder, name, None)
            if type(value) is int and 400 <= value < 600:
                return value
    return None


@dataclass
class Wait:
    """The repetitions of one piece of work."""

    began: float = field(default_factory=time.monotonic)
    backoff: Backoff = field(default_factory=lambda: Backoff(0.5, 30.0))


class Outages:
    """The waiting of all rows for the services that the user's code calls."""

    def __init__(self, patience: float, what: str, error: type[EnvError]) -> None:
        """`patience`: seconds; 0: nothing is repeated. `what`, `error`: wording and class of the error that ends the
        run."""
        self._patience, self._what, self._error = patience, what, error
        self._answered: dict[str, float] = {}
        self._away: set[str] = set()

    def answered(self, name: str) -> None:
        """Records that the code `name` worked."""
        self._answered[name] = time.monotonic()
        if name in self._away:
            self._away.discard(name)
            logger.info("%s '%s' works again", self._what, name)

    async def wait(self, name: str, wait: Wait, why: str) -> bool:
        """Pauses after an error that may pass. Returns whether the work may be repeated.

        Returns False after `patience` seconds if the code `name` worked for other rows meanwhile. Otherwise raises the
        class of error that ends the run.
        """
        if self._patience <= 0:
            return False
        seconds = time.monotonic() - wait.began
        why = redact_text(why)
        if seconds >= self._patience:
            if self._answered.get(name, -1.0) >= wait.began:
                return False
            raise self._error(
                "service_unavailable",
                f"{self._what} '{name}' failed for {seconds:.0f} s, and no call worked: {why}; is the service that it "
                "calls running? `patience` is the time that the run waits for it",
                name=name,
                seconds=seconds,
            )
        if name not in self._away:
            self._away.add(name)
            logger.warning("%s '%s': %s; it is repeated for up to %g s", self._what, name, why, self._patience)
        await asyncio.sleep(min(wait.backoff.next(), self._patience - seconds))
        return True
