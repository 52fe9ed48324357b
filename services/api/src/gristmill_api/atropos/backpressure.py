"""Waits while the store is full or away. Atropos' clients drop data on 4xx and stop after three 5xx."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from redis.exceptions import RedisError

from gristmill_api import errors
from gristmill_api.context import Context
from gristmill_api.errors import ApiProblem
from gristmill_api.store import keys

T = TypeVar("T")

_WAITING_SHARE: Final = 0.5
"""Part of API_MAX_CONCURRENT_BODY_BYTES that waiting bodies may take. Beyond it the answer is 503 at once."""


class Backpressure:
    """Repeats calls that a full or absent store refused, for API_MAX_WAIT_S seconds at most. The calls must be safe to
    repeat."""

    def __init__(self, ctx: Context, run_id: str) -> None:
        self._ctx = ctx
        self._topic = keys.ready_topic(run_id)
        self._waiting_bytes = 0
        self._max_waiting_bytes = _WAITING_SHARE * ctx.limits.max_concurrent_body_bytes

    async def retry(self, attempt: Callable[[], Awaitable[T]], gone: Callable[[], Awaitable[bool]], size: int = 0) -> T:
        """Returns the result of `attempt`. `size`: bytes that the request holds meanwhile.

        Raises ApiProblem (503) if the store stays full or away, or the client is `gone()`.
        """
        try:
            return await attempt()
        except (RedisError, ApiProblem) as error:
            refused = _passing(error)
        if self._waiting_bytes + size > self._max_waiting_bytes:
            raise _busy(refused)
        self._waiting_bytes += size
        try:
            return await self._repeat(attempt, gone, refused)
        finally:
            self._waiting_bytes -= size

    async def _repeat(
        self, attempt: Callable[[], Awaitable[T]], gone: Callable[[], Awaitable[bool]], refused: ApiProblem
    ) -> T:
        first = True

        async def again() -> tuple[T] | None:
            nonlocal first, refused
            if first:
                first = False
                return None
            try:
                return (await attempt(),)
            except (RedisError, ApiProblem) as error:
                refused = _passing(error)
                return None

        wait = self._ctx.wait(self._ctx.limits.max_wait_s)
        result = await self._ctx.notifications.poll(self._topic, again, wait, gone)
        if result is None:
            raise _busy(refused)
        return result[0]


def _passing(error: RedisError | ApiProblem) -> ApiProblem:
    """Returns a problem that waiting may solve. Raises any other error again."""
    refused = errors.from_redis(error) if isinstance(error, RedisError) else error
    if refused is None or refused.code not in ("store_full", "store_unavailable"):
        raise error
    return _busy(refused)


def _busy(refused: ApiProblem) -> ApiProblem:
    """Returns a new problem of status 503. An exception that was raised would keep its frames alive, and the bodies in
    them, until the garbage collector runs."""
    return ApiProblem(refused.code, 503, refused.message, refused.remedy, refused.retry_after)
