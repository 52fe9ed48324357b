"""The trajectory API's client for code that is not async."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from gristmill.client import Client
from gristmill.group import TrajectoryGroup
from gristmill.run import AtroposRegistration, GroupAudit, MetricsRow, PermitGrant, RunRecord, RunStatus
from gristmill.version import PolicyVersion

T = TypeVar("T")


class SyncClient:
    """A blocking `Client`, with the same methods. Its event loop runs in a separate thread.

    Several threads may use the same SyncClient.
    """

    def __init__(
        self,
        url: str,
        *,
        patience: float | Callable[[], float] = 600.0,
        timeout: float = 30.0,
        token: str | None = None,
        compress: bool = False,
    ) -> None:
        self._client = Client(url, patience=patience, timeout=timeout, token=token, compress=compress)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gristmill-client", daemon=True)
        self._thread.start()
        self.url = self._client.url

    def create_run(self, run_id: str, env: dict[str, Any], group_size: int, stack: str | None = "default") -> RunRecord:
        return self._wait(self._client.create_run(run_id, env, group_size, stack))

    def get_run(self, run_id: str) -> RunRecord:
        return self._wait(self._client.get_run(run_id))

    def open_run(self, wait: float, stack: str = "default") -> RunRecord | None:
        return self._wait(self._client.open_run(wait, stack))

    def register_atropos(self, registration: AtroposRegistration) -> None:
        self._wait(self._client.register_atropos(registration))

    def take(
        self,
        run_id: str,
        trainer: dict[str, Any],
        covered: Sequence[str],
        step: int | None = None,
        creation: str | None = None,
    ) -> tuple[int, RunRecord]:
        return self._wait(self._client.take(run_id, trainer, covered, step, creation))

    def record_version(self, run_id: str, version: PolicyVersion) -> RunRecord:
        return self._wait(self._client.record_version(run_id, version))

    def permits(self, run_id: str, holder: str, count: int, wait: float) -> PermitGrant:
        return self._wait(self._client.permits(run_id, holder, count, wait))

    def submit(self, group: TrajectoryGroup, holder: str) -> bool:
        return self._wait(self._client.submit(group, holder))

    def lease(
        self,
        run_id: str,
        incarnation: int,
        batch_id: str,
        groups: int | None = None,
        *,
        sequences: int | None = None,
        tokens: int | None = None,
        max_staleness: int | None = None,
        wait: float,
    ) -> list[TrajectoryGroup] | None:
        amounts = {"sequences": sequences, "tokens": tokens, "max_staleness": max_staleness}
        return self._wait(self._client.lease(run_id, incarnation, batch_id, groups, **amounts, wait=wait))

    def extend(self, run_id: str, incarnation: int, batch_ids: Sequence[str]) -> list[str]:
        return self._wait(self._client.extend(run_id, incarnation, batch_ids))

    def ack(self, run_id: str, incarnation: int, batch_ids: Sequence[str]) -> None:
        self._wait(self._client.ack(run_id, incarnation, batch_ids))

    def nack(self, run_id: str, incarnation: int, batch_ids: Sequence[str]) -> int:
        return self._wait(self._client.nack(run_id, incarnation, batch_ids))

    def report_metrics(self, run_id: str, source: str, step: int, values: Mapping[str, Any]) -> None:
        self._wait(self._client.report_metrics(run_id, source, step, values))

    def metrics(self, run_id: str, source: str, after_step: int = -1) -> list[MetricsRow]:
        return self._wait(self._client.metrics(run_id, source, after_step))

    def finish(self, run_id: str, incarnation: int) -> RunRecord:
        return self._wait(self._client.finish(run_id, incarnation))

    def close_run(self, run_id: str) -> RunRecord:
        return self._wait(self._client.close_run(run_id))

    def delete_run(self, run_id: str) -> None:
        self._wait(self._client.delete_run(run_id))

    def status(self, run_id: str) -> RunStatus:
        return self._wait(self._client.status(run_id))

    def audit(self, run_id: str) -> GroupAudit:
        return self._wait(self._client.audit(run_id))

    def close(self) -> None:
        self._wait(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> SyncClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C in the caller must also end the request.
            raise
