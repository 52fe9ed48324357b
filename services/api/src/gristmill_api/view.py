"""The store's runs, as the page reads them. Its files need no token; its data need one of any role.

Counts come from the store. A separate process reads metrics, groups and rollouts from the runs' files. All of that
happens only while a page is open.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, cast

from redis.exceptions import RedisError

from gristmill import Environment, MetricsRow, RunEvent, RunRecord, RunState, RunStatus
from gristmill.sync_client import SyncClient
from gristmill_api.store import Store
from gristmill_view.facts import ApiReader, Facts
from gristmill_view.source import ViewError, in_thread

T = TypeVar("T")
_MOST_RUNS: Final = 50
_FRESH_S: Final = 0.5
"""Facts that are younger than this are not read again."""
_IDLE_S: Final = 60.0
"""After this long without a page the reader of a run ends."""
_ANSWER_S: Final = 10.0
_EVENTS: Final = 256


class LiveRuns:
    """The runs of the store, for `gristmill_view.run_source.RunSource`."""

    def __init__(self, store: Store, model_urls: tuple[str, ...] = ()) -> None:
        """`model_urls`: model servers whose weights the page shows."""
        self._store = store
        self._model_urls = model_urls
        self._readers: dict[str, _Reader] = {}

    async def runs(self) -> list[str]:
        """Returns the ids of the newest runs. Raises ViewError while Redis is away."""
        with _redis_errors():
            return [record.run_id for record in reversed(await self._store.runs.all(-_MOST_RUNS, _MOST_RUNS))]

    async def facts(self, run: str) -> Facts | None:
        """Returns the facts of a run; None if the store does not have it. Raises ViewError while Redis is away."""
        with _redis_errors():
            if not await self._store.runs.exists(run):
                return None
            reader = self._readers.get(run)
            if reader is None or reader.client.ended:
                self._readers = {name: kept for name, kept in self._readers.items() if not kept.client.ended}
                is_open = (await self._store.runs.record(run)).state == RunState.OPEN
                reader = self._readers[run] = _Reader.of(self._store, run, self._model_urls if is_open else (), is_open)
            return await reader.read()


@contextlib.contextmanager
def _redis_errors() -> Iterator[None]:
    try:
        yield
    except (RedisError, TimeoutError) as error:
        raise ViewError(
            "store_unavailable", "The API cannot reach Redis.", status=503,
            remedy="Look at Redis' log. The API continues when Redis is back.",
        ) from error  # fmt: skip


@dataclass
class _Reader:
    """Reads one run on a thread, for all pages."""

    client: _StoreClient
    reader: ApiReader
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    facts: Facts | None = None
    read_at: float = 0.0

    @classmethod
    def of(cls, store: Store, run: str, model_urls: tuple[str, ...], follow: bool) -> _Reader:
        client = _StoreClient(store, asyncio.get_running_loop())
        return cls(client, ApiReader(cast(SyncClient, client), run, model_urls=model_urls, follow=follow))

    async def read(self) -> Facts:
        async with self.turn:
            if self.facts is None or time.monotonic() - self.read_at > _FRESH_S:
                self.facts = await in_thread(self.reader.read)
                self.read_at = time.monotonic()
            return self.facts


class _StoreClient:
    """The calls of SyncClient that ApiReader makes, answered by the store of this process. For threads."""

    def __init__(self, store: Store, loop: asyncio.AbstractEventLoop) -> None:
        self._store = store
        self._loop = loop
        self._used = time.monotonic()

    @property
    def ended(self) -> bool:
        """Whether no page asked for a while."""
        return time.monotonic() - self._used > _IDLE_S

    def get_run(self, run_id: str) -> RunRecord:
        self._used = time.monotonic()
        return self._wait(self._store.runs.record(run_id))

    def status(self, run_id: str) -> RunStatus:
        return self._wait(self._store.runs.status(run_id))

    def environments(self, run_id: str) -> list[Environment]:
        return self._wait(self._store.envs.all(run_id))

    def metrics(self, run_id: str, source: str, after_step: int = -1, limit: int = 10_000) -> list[MetricsRow]:
        rows = self._wait(self._store.journal.rows(run_id, source, after_step, limit))
        return [MetricsRow(source=source, **json.loads(row)) for row in rows]

    def events(self, run_id: str, after: str = "0-0") -> Iterator[RunEvent]:
        """Yields the events until no page asks any more."""
        while not self.ended:
            new_events = self._wait(self._store.journal.events(run_id, after, _EVENTS))
            yield from new_events
            after = new_events[-1].id if new_events else after
            if len(new_events) < _EVENTS:
                time.sleep(1.0)

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(_ANSWER_S)
