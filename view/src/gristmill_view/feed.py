"""News of a run for all its open pages: one poll per second, however many pages are open, and none without a page."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import msgspec

from gristmill_view.run_source import RunSource
from gristmill_view.source import ViewError

_LOG = logging.getLogger(__name__)
PERIOD_S: Final = 1.0
_STILL_PERIOD_S: Final = 5.0
_ROWS: Final = 512
"""Rows of metrics that a feed keeps. A page that is further behind reloads its series."""
_SILENCE_S: Final = 15.0
"""After this long without news a comment keeps the connection open through proxies."""
_encode = msgspec.json.encode


def event(kind: str, data: bytes) -> bytes:
    """Returns a server-sent event. `data`: JSON, which has no line break."""
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


class Feed:
    """Polls one run and keeps its newest rows and its state, encoded once for all pages."""

    def __init__(self, source: RunSource, run: str, after_step: int) -> None:
        self._source = source
        self._run = run
        self._last = after_step
        self._complete_after = after_step
        """`_rows` holds every row after this step."""
        self._rows: deque[tuple[int, bytes]] = deque(maxlen=_ROWS)
        self._rewinds = 0
        """How many times a trainer resumed from an earlier step. Pages then reload all series."""
        self._state: dict[str, bytes] = {}
        self._moves = True
        """False once the run is finished: only a person who trains it longer changes that."""
        self._changed = asyncio.Event()
        """Set by the next poll, which then makes another one. No lock: a page may end its wait at any moment."""
        self._poller: asyncio.Task[None] | None = None
        self.pages = 0
        """Pages that are open."""

    async def events(self, after_step: int, stopping: Callable[[], bool]) -> AsyncIterator[bytes]:
        """Yields the events of one page until `stopping` returns True: rows after `after_step`, then all news."""
        self._join()
        sent: dict[str, bytes] = {}
        rewinds = self._rewinds
        silent = 0.0
        try:
            yield b": open\n\n"
            while not stopping():
                changed = self._changed
                new_events, after_step, rewinds = self._rows_after(after_step, rewinds)
                for kind, data in self._state.items():
                    if sent.get(kind) != data:
                        sent[kind] = data
                        new_events.append(event(kind, data))
                if new_events:
                    silent = 0.0
                    yield b"".join(new_events)
                elif silent >= _SILENCE_S:
                    silent = 0.0
                    yield b": still here\n\n"
                try:
                    await asyncio.wait_for(changed.wait(), PERIOD_S)
                except TimeoutError:
                    silent += PERIOD_S
        finally:
            self._leave()

    def _rows_after(self, after_step: int, rewinds: int) -> tuple[list[bytes], int, int]:
        if rewinds != self._rewinds or after_step < self._complete_after:
            return [event("reload", b"{}")], self._last, self._rewinds
        new_events = [event("step", row) for step, row in self._rows if step > after_step]
        return new_events, max(after_step, self._last) if new_events else after_step, rewinds

    def _join(self) -> None:
        self.pages += 1
        if self._poller is None:
            self._poller = asyncio.create_task(self._poll(), name=f"feed-{self._run}")

    def _leave(self) -> None:
        self.pages -= 1
        if self.pages == 0 and self._poller is not None:
            self._poller.cancel()
            self._poller = None

    async def _poll(self) -> None:
        while True:
            try:
                news = await self._source.news(self._run, self._last)
            except ViewError as error:
                self._state["trouble"] = _encode({"code": error.code, "text": str(error), "remedy": error.remedy})
            except Exception:  # noqa: BLE001  the next poll may work; the page shows that it is not connected
                _LOG.exception("cannot read the news of run %s", self._run)
            else:
                self._take(news["steps"], news["last_step"], dict(news["overview"]))
            self._changed.set()
            self._changed = asyncio.Event()
            await asyncio.sleep(PERIOD_S if self._moves else _STILL_PERIOD_S)

    def _take(self, steps: list[dict[str, Any]], last_step: int, overview: dict[str, Any]) -> None:
        if last_step < self._last:
            self._rows.clear()
            self._rewinds += 1
            self._last = self._complete_after = last_step
        if len(steps) >= _ROWS:  # there may be more, which were left out
            self._rows.clear()
            self._complete_after = steps[0]["step"] - 1
        for row in steps:
            if len(self._rows) == _ROWS:
                self._complete_after = self._rows[0][0]
            self._rows.append((row["step"], _encode(row)))
            self._last = max(self._last, row["step"])
        self._moves = overview.get("state") != "finished"
        trouble = overview.pop("trouble", None)
        overview.pop("settings", None)
        self._state = {"services": _encode(overview), "trouble": _encode(trouble)}


class Feeds:
    """The feeds of all runs that have an open page."""

    def __init__(self, source: RunSource) -> None:
        self._source = source
        self._feeds: dict[str, Feed] = {}

    def of(self, run: str, after_step: int) -> Feed:
        """Returns the feed of a run. `after_step`: where a new feed begins."""
        feed = self._feeds.get(run)
        if feed is None:
            self._feeds = {name: kept for name, kept in self._feeds.items() if kept.pages}
            feed = self._feeds[run] = Feed(self._source, run, after_step)
        return feed
