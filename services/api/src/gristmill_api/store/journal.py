"""The journal of a run: metrics, events and the latest examples."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from redis.asyncio import Redis

from gristmill import MetricsRow, RunEvent
from gristmill_api import errors
from gristmill_api.store import keys
from gristmill_api.store.records import text
from gristmill_api.store.scripts import Scripts

KEPT_ROWS = 10_000
"""Rows of metrics kept per source."""
MOST_SOURCES = 64
"""Sources of metrics per run."""
MOST_ROW_BYTES = 32 * 1024
"""Of one row of metrics as JSON."""
KEPT_BYTES = 64 * 1024 * 1024
"""Of the rows of all runs. Beyond it, the source that has the most loses its oldest rows."""
MOST_EVENT_BYTES = 4 * 1024
"""An event holds the values of its row of metrics if they are no longer than this."""

SHARED_SOURCES = frozenset({"eval", "data.rows"})
"""Sources for which each registered environment of the run reports."""


class Journal:
    def __init__(self, redis: Redis, scripts: Scripts) -> None:
        self._redis = redis
        self._scripts = scripts

    async def record_metrics(self, run_id: str, row: MetricsRow) -> None:
        """Store one row. Another row of the same source and step replaces it.

        Raises ApiProblem for a row over MOST_ROW_BYTES (413), for one of too many sources (409), and for one of
        SHARED_SOURCES from an environment that is not registered (404)."""
        values = json.dumps({"step": row.step, "values": row.values}, allow_nan=False)
        if len(values) > MOST_ROW_BYTES:
            raise errors.too_long(f"the row of metrics of {row.source!r}", len(values), MOST_ROW_BYTES)
        bounds = KEPT_ROWS, MOST_SOURCES, KEPT_BYTES, MOST_EVENT_BYTES
        shared = "1" if row.source in SHARED_SOURCES else ""
        (status,) = await self._scripts.call("record_metrics", run_id, row.source, row.step, values, *bounds, shared)
        if status == "UNREGISTERED":
            raise errors.writer_missing(run_id, row.source)
        if status == "FULL":
            raise errors.too_many(
                "sources", f"run {run_id!r} has {MOST_SOURCES} sources of metrics", "Report under one of their names."
            )

    async def sources(self, run_id: str) -> list[str]:
        members = await self._redis.smembers(keys.prefix(run_id) + "metrics")
        return sorted(text(name) for name in members)

    async def rows(self, run_id: str, source: str, after_step: int, limit: int) -> list[bytes]:
        """Rows of later steps, in order, each as a JSON object with `step` and `values`."""
        key = keys.metrics(run_id, source)
        entries: Any = await self._redis.zrangebyscore(key, f"({after_step}", "+inf", start=0, num=limit)
        return list(entries)

    async def events(self, run_id: str, after: str, limit: int) -> list[RunEvent]:
        """Returns events after the event of id `after`, oldest first. The stream keeps a limited number of events."""
        entries: Any = await self._redis.xrange(keys.prefix(run_id) + "events", f"({after}", "+", count=limit)
        return [_event(event_id, fields) for event_id, fields in entries]

    async def newest_event(self, run_id: str) -> str:
        """The id that new events come after."""
        entries: Any = await self._redis.xrevrange(keys.prefix(run_id) + "events", count=1)
        return text(entries[0][0]) if entries else "0-0"

    async def examples(self, run_id: str, limit: int) -> AsyncIterator[tuple[str, bytes]]:
        """The groups submitted last, newest first: ids and stored bytes.

        Groups of up to 1 MiB stay examples for a day after their training. One group is in memory at a time.
        """
        ids: list[bytes] = await self._redis.lrange(keys.prefix(run_id) + "latest", 0, limit - 1)  # type: ignore[assignment]
        for name in ids:
            group_id = text(name)
            held, kept = await self._redis.mget(keys.payload(run_id, group_id), keys.example(run_id, group_id))
            if held or kept:
                yield group_id, held or kept  # type: ignore[misc]


def _event(event_id: bytes, fields: dict[bytes, bytes]) -> RunEvent:
    values: dict[str, Any] = {text(name): text(value) for name, value in fields.items()}
    return RunEvent(id=text(event_id), kind=values.pop("kind"), fields=values)
