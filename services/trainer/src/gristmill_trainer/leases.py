"""The trainer's leases: taken, extended, then trained or given back, and acked once a checkpoint covers them."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Literal

from gristmill import GristmillError, SyncClient, TrajectoryGroup
from gristmill.logs import line
from gristmill_trainer.errors import LeaseLostError, of_thread

_LOG = logging.getLogger(__name__)
# Seconds between extensions; the API's lease lasts 120 s.
_HEARTBEAT = 20.0


@dataclass
class _Batch:
    group_ids: list[str]
    trained: bool = False


class Leases:
    """Leased batches without an ack, one per step. A thread extends them; the next call raises if a lease was lost.

    Thread-safe: one thread may lease the next step's batch while another thread trains.
    """

    def __init__(
        self, api: SyncClient, run_id: str, incarnation: int, unit: Literal["groups", "sequences"] = "groups"
    ) -> None:
        """`unit`: the unit that `take` counts. Use sequences if group sizes vary."""
        self._api = api
        self._run_id = run_id
        self._incarnation = incarnation
        self.unit = unit
        self._held: dict[str, _Batch] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._failure: GristmillError | None = None
        self._thread = threading.Thread(target=self._keep_alive, name="lease-heartbeat", daemon=True)
        self._thread.start()

    def batch_id(self, step: int) -> str:
        """Returns the batch id of optimizer step `step`, so that a repeated call asks for the same batch."""
        return f"{self._incarnation}.{step}"

    def take(self, step: int, amount: int, wait: float) -> list[TrajectoryGroup] | None:
        """Leases groups for optimizer step `step`. Returns None if `amount` is not ready after `wait` seconds."""
        self._raise_failure()
        batch_id = self.batch_id(step)
        if self.unit == "groups":
            batch = self._api.lease(self._run_id, self._incarnation, batch_id, amount, wait=wait)
        else:
            batch = self._api.lease(self._run_id, self._incarnation, batch_id, sequences=amount, wait=wait)
        if batch is not None:
            self._hold(batch_id, [group.group_id for group in batch])
        return batch

    def _hold(self, batch_id: str, group_ids: list[str]) -> None:
        """Records the batch. Raises LeaseLostError if this trainer already holds one of its groups.

        The lease of that group expired unnoticed, because the machine slept or Redis' clock stepped. Training would
        put the group into the weights twice.
        """
        with self._lock:
            again = {*group_ids} & {group_id for held in self._held.values() for group_id in held.group_ids}
            if again:
                raise LeaseLostError(
                    "lease_lost",
                    f"batch {batch_id} holds groups that this trainer already had since its last checkpoint "
                    f"({', '.join(sorted(again))}): their leases expired meanwhile; "
                    "start the trainer again: it resumes from its last checkpoint",
                    batches=[batch_id],
                    groups=sorted(again),
                )
            self._held[batch_id] = _Batch(group_ids)

    def trained(self, step: int) -> None:
        """Marks the batch as trained, so that the next checkpoint covers it. Quarantined batches are marked too."""
        with self._lock:
            self._held[self.batch_id(step)].trained = True

    def give_back(self, *steps: int) -> None:
        """Returns untrained batches to the API: their groups are ready again at once, in their old queue positions.

        Steps without a held batch are ignored. Raises ValueError for a trained batch.
        """
        with self._lock:
            batch_ids = [self.batch_id(step) for step in steps]
            batch_ids = [batch_id for batch_id in batch_ids if batch_id in self._held]
            for batch_id in batch_ids:
                if self._held[batch_id].trained:
                    raise ValueError(f"batch {batch_id} is trained")
                del self._held[batch_id]
        if batch_ids:
            groups = self._api.nack(self._run_id, self._incarnation, batch_ids)
            _LOG.info(line("give back", batches=len(batch_ids), groups=groups))

    @property
    def covered(self) -> list[str]:
        """Ids of the groups trained since the last ack, which a checkpoint written now covers.

        Untrained groups are not included, because they are leased again after a kill.
        """
        with self._lock:
            return [group_id for batch in self._held.values() if batch.trained for group_id in batch.group_ids]

    def ack(self) -> None:
        """Acks the trained batches. Call this after a durable checkpoint covers them."""
        self._raise_failure()
        with self._lock:
            batch_ids = [batch_id for batch_id, batch in self._held.items() if batch.trained]
        if batch_ids:
            self._api.ack(self._run_id, self._incarnation, batch_ids)
            with self._lock:
                for batch_id in batch_ids:
                    del self._held[batch_id]
            _LOG.info(line("ack", batches=len(batch_ids)))

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _keep_alive(self) -> None:
        while not self._closed.wait(_HEARTBEAT):
            with self._lock:
                batch_ids = list(self._held)
            if not batch_ids:
                continue
            try:
                lost = self._api.extend(self._run_id, self._incarnation, batch_ids)
            except Exception as error:  # noqa: BLE001  Raised by the next call: leases that nobody extends run out.
                self._failure = of_thread("extending the leases", error)
                return
            with self._lock:
                really_lost = [batch_id for batch_id in lost if batch_id in self._held]
            if really_lost:
                self._failure = LeaseLostError(
                    "lease_lost",
                    f"the leases of batches {', '.join(really_lost)} expired and their groups went back to the queue; "
                    "start the trainer again: it resumes from its last checkpoint",
                    batches=really_lost,
                )
                return

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
