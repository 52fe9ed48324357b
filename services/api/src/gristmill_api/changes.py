"""Waiting without polling: a request sleeps until Redis tells that its answer may have changed.

Every script that may let somebody go on publishes a topic on one channel (store/keys.py). One task of this
process listens and wakes the requests that wait for the topic, whichever process made the change. What no
script announces (a permit or lease that expires), and what a broken connection swallowed, is found by a
re-check once a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from gristmill_api.store import keys

T = TypeVar("T")

RECHECK_S = 1.0


class Changes:
    """Who waits for which topic. Lives on one event loop."""

    def __init__(self) -> None:
        self._waiting: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self._closed = False

    def tell(self, topic: str) -> None:
        """Wake who waits for the topic "archive gm:{a}:", for "archive" of whichever run, or for that run's events:
        what a script tells, it has written down before."""
        kind, _, prefix = topic.partition(" ")
        for name in {topic, kind, keys.events_topic_of(prefix)}:
            for event in self._waiting.get(name, ()):
                event.set()

    def tell_all(self) -> None:
        for topic in self._waiting:
            self.tell(topic)

    @property
    def closed(self) -> bool:
        """The process wants to stop: nobody should wait any more."""
        return self._closed

    def close(self) -> None:
        """Let every wait end now, with the answer there is: the process wants to stop."""
        self._closed = True
        self.tell_all()

    async def poll(
        self,
        topic: str,
        attempt: Callable[[], Awaitable[T | None]],
        wait: float,
        gone: Callable[[], Awaitable[bool]],
    ) -> T | None:
        """Repeat `attempt` at each change of `topic` until it returns something, for `wait` seconds at most.

        Stops early when `gone()`: an attempt for a client that hung up could hand it a batch or a permit.
        """
        deadline = time.monotonic() + wait
        with self.listening(topic) as changed:
            while True:
                # Cleared before the attempt, so that no change in between is missed.
                changed.clear()
                result = await attempt()
                left = deadline - time.monotonic()
                if result is not None or left <= 0 or self._closed:
                    return result
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(changed.wait(), min(left, RECHECK_S))
                if await gone():
                    return None

    @contextlib.contextmanager
    def listening(self, topic: str) -> Iterator[asyncio.Event]:
        """The event is set at every change of the topic; the caller clears it."""
        event = asyncio.Event()
        self._waiting[topic].add(event)
        try:
            yield event
        finally:
            self._waiting[topic].discard(event)
            if not self._waiting[topic]:
                del self._waiting[topic]
