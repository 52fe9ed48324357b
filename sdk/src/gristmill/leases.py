"""A trainer's session with a run: it takes the run, leases batches, keeps the leases alive, and acks trained batches.

The order of calls for an optimizer step:

    lease(step) -> train -> trained(step) -> write a checkpoint with `covered` -> ack() -> record_version(step)

A checkpoint need not follow every step. It covers all steps that were trained since the last ack. A trainer may take
further steps while it writes a checkpoint of `step`. Then it calls ack(step).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from gristmill.errors import ApiError, ErrorCode, GristmillError, LeaseLostError, of_thread
from gristmill.group import TrajectoryGroup
from gristmill.internal.logs import line
from gristmill.policy_version import PolicyVersion
from gristmill.run import Protocol, RunRecord
from gristmill.sync_client import SyncClient

_LOG = logging.getLogger(__name__)
HEARTBEAT = 20.0
"""Seconds between extensions. The API's leases last API_LEASE_TTL_S seconds (120)."""
_GOODBYE = 5.0
_RUN_EVERY = 1.0
"""Seconds between attempts to take a run that does not exist yet."""


@dataclass
class _Batch:
    group_ids: list[str]
    trained: bool = False


class LeaseSession:
    """One trainer's hold on a run, as a context manager. A thread extends the leases of all batches without an ack.

    Thread-safe: one thread may lease the next step's batch while another thread trains.

    If the heartbeat thread cannot extend the leases, the next `lease` or `ack` raises the thread's error:

    - LeaseLostError: the groups returned to the queue, so the weights must go back to the last checkpoint.
    - ApiError `fenced`: another trainer has taken the run.
    """

    def __init__(
        self,
        api: SyncClient,
        run_id: str,
        trainer: Mapping[str, Any],
        *,
        covered: Sequence[str] = (),
        step: int | None = None,
        creation: str | None = None,
        wait: float = 0.0,
        heartbeat: float = HEARTBEAT,
    ) -> None:
        """`trainer`: the trainer's settings, of which the API reads batch_size, gradient_accumulation_steps,
        training_steps and max_staleness.

        From the resumed checkpoint: `covered`, the ids that `covered` had when it was written; `step`, its number of
        optimizer steps; `creation`, the `creation` of its run.

        `wait`: seconds to wait for the run, if no environment has opened it yet. `heartbeat`: seconds between
        extensions.
        """
        self._api = api
        self._run_id = run_id
        self._trainer = dict(trainer)
        self._resumed = (list(covered), step, creation)
        self._wait = wait
        self._heartbeat = heartbeat
        self._record: RunRecord | None = None
        self._held: dict[str, _Batch] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._failure: GristmillError | None = None
        self._thread = threading.Thread(target=self._keep_alive, name="lease-heartbeat", daemon=True)

    def __enter__(self) -> LeaseSession:
        """Takes the run. Raises the errors of `SyncClient.take`; `run_missing` if the run is not opened in time."""
        self._record = self._take()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Stops the thread, and returns the batches that were not trained.

        Trained batches without an ack stay leased, because a checkpoint may cover them: the run's next trainer names
        the groups of its checkpoint, and the API returns the others to the queue. After a GristmillError all batches
        stay leased, because the API may be unreachable or the run may have another trainer.
        """
        self._closed.set()
        self._thread.join(_GOODBYE)
        if isinstance(error, GristmillError):
            return
        # The client may wait for an API that is away for minutes.
        returning = threading.Thread(target=self._return_untrained, name="lease-return", daemon=True)
        returning.start()
        returning.join(_GOODBYE)
        if returning.is_alive():
            _LOG.warning("untrained batches are not returned within %g s; their leases expire", _GOODBYE)

    def _return_untrained(self) -> None:
        try:
            self._return([batch_id for batch_id, batch in self._held.items() if not batch.trained])
        except GristmillError as refused:
            _LOG.warning("untrained batches could not be returned (%s); their leases expire", refused)

    def _take(self) -> RunRecord:
        covered, step, creation = self._resumed
        until = time.monotonic() + self._wait
        logged = False
        while True:
            try:
                return self._api.take(self._run_id, self._trainer, covered, step, creation)[1]
            except ApiError as error:
                seconds_left = until - time.monotonic()
                if error.code != ErrorCode.RUN_MISSING or seconds_left <= 0:
                    raise
            if not logged:
                _LOG.info("waiting up to %.0f s until an environment opens run %s", self._wait, self._run_id)
                logged = True
            time.sleep(min(_RUN_EVERY, seconds_left))

    @property
    def run(self) -> RunRecord:
        """The run's record when this trainer took it. A checkpoint keeps its `creation`."""
        assert self._record is not None, "use the session in a with statement"
        return self._record

    @property
    def incarnation(self) -> int:
        """The number of this trainer among the run's trainers. It is the first part of policy versions ("2.15")."""
        return self.run.incarnation

    @property
    def _creation(self) -> str | None:
        return self.run.creation or None

    @property
    def covered(self) -> list[str]:
        """Ids of the groups trained since the last ack, which a checkpoint written now covers."""
        with self._lock:
            return [group_id for batch in self._held.values() if batch.trained for group_id in batch.group_ids]

    def version(self, step: int) -> PolicyVersion:
        """Returns the version of the weights after `step` steps. Its text is their label at the model server."""
        return PolicyVersion(self.incarnation, step)

    def batch_id(self, step: int) -> str:
        """Returns the batch id of optimizer step `step`."""
        return str(self.version(step))

    def lease(self, step: int, wait: float, amount: int | None = None) -> list[TrajectoryGroup] | None:
        """Leases the batch of optimizer step `step`, in submit order. A repeated call leases the step's batch again.

        Returns None if the batch is not ready after `wait` seconds. `amount`: number of groups, by default the run's
        groups per step; in a run of Atropos' environments, whose groups vary in size, number of sequences.

        Raises ValueError for a trained step, LeaseLostError, or the errors of `SyncClient.lease`.
        """
        self._raise_failure()
        self._refuse_trained([self.batch_id(step)])
        if amount is None:
            amount = self.run.groups_per_step
        by_sequences = self.run.protocol is Protocol.ATROPOS
        batch = self._api.lease(
            self._run_id,
            self.incarnation,
            self.batch_id(step),
            groups=None if by_sequences else amount,
            sequences=amount if by_sequences else None,
            wait=wait,
            creation=self._creation,
        )
        if batch is not None:
            self._hold(self.batch_id(step), [group.group_id for group in batch])
        return batch

    def trained(self, step: int) -> None:
        """Marks the batch as trained, so that the next checkpoint covers it. Mark a skipped batch too."""
        with self._lock:
            self._held[self.batch_id(step)].trained = True

    def ack(self, step: int | None = None) -> None:
        """Reports that a durable checkpoint covers the trained batches.

        `step`: of the checkpoint. Batches of later steps stay leased until the next ack. None: the last trained step.

        Raises LeaseLostError, or the errors of `SyncClient.ack`.
        """
        self._raise_failure()
        with self._lock:
            batch_ids = [
                batch_id
                for batch_id, batch in self._held.items()
                if batch.trained and (step is None or PolicyVersion.parse(batch_id).step <= step)
            ]
        if batch_ids:
            self._api.ack(self._run_id, self.incarnation, batch_ids, creation=self._creation)
            with self._lock:
                for batch_id in batch_ids:
                    del self._held[batch_id]
            _LOG.info(line("ack", batches=len(batch_ids)))

    def give_back(self, *steps: int) -> None:
        """Returns untrained batches: their groups are ready again at once, in their old places in the queue.

        Steps without a batch are ignored. Raises ValueError for a trained batch.
        """
        with self._lock:
            batch_ids = [batch_id for batch_id in map(self.batch_id, steps) if batch_id in self._held]
        self._refuse_trained(batch_ids)
        self._return(batch_ids)

    def record_version(self, version: PolicyVersion | str | int) -> None:
        """Reports that the model server now serves `version`. This frees permits for these weights.

        A number is a step of this trainer: 20 is `session.version(20)`. Raises the errors of
        `SyncClient.record_version`.
        """
        served = self.version(version) if isinstance(version, int) else PolicyVersion.of(version)
        self._api.record_version(self._run_id, served, creation=self._creation)

    def report_metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Sends a row of metrics of the source "trainer". See `SyncClient.report_metrics`."""
        self._api.report_metrics(self._run_id, "trainer", step, values, creation=self._creation)

    def finish(self) -> None:
        """Ends the run."""
        self._api.finish(self._run_id, self.incarnation, creation=self._creation)

    def _hold(self, batch_id: str, group_ids: list[str]) -> None:
        """Records the batch. Raises LeaseLostError if the session already holds one of its groups in another batch.

        The lease of that group expired unnoticed, because the machine slept or Redis' clock stepped. Training would
        put the group into the weights twice.
        """
        with self._lock:
            others = {group_id for name, held in self._held.items() if name != batch_id for group_id in held.group_ids}
            if again := sorted(others.intersection(group_ids)):
                raise LeaseLostError(
                    "lease_lost",
                    f"batch {batch_id} holds groups that this trainer already had since its last checkpoint "
                    f"({', '.join(again)}): their leases expired meanwhile; "
                    "start the trainer again from its last checkpoint",
                    batches=[batch_id],
                    groups=again,
                )
            self._held[batch_id] = _Batch(group_ids)

    def _refuse_trained(self, batch_ids: list[str]) -> None:
        with self._lock:
            for batch_id in batch_ids:
                if batch_id in self._held and self._held[batch_id].trained:
                    raise ValueError(f"batch {batch_id} is trained")

    def _return(self, batch_ids: list[str]) -> None:
        """Returns the batches to the queue. The heartbeat ignores them from now on."""
        with self._lock:
            for batch_id in batch_ids:
                del self._held[batch_id]
        if batch_ids:
            groups = self._api.nack(self._run_id, self.incarnation, batch_ids, creation=self._creation)
            _LOG.info(line("give back", batches=len(batch_ids), groups=groups))

    def _keep_alive(self) -> None:
        while not self._closed.wait(self._heartbeat):
            with self._lock:
                batch_ids = list(self._held)
            if not batch_ids:
                continue
            try:
                lost = self._api.extend(self._run_id, self.incarnation, batch_ids, creation=self._creation)
            except Exception as error:  # noqa: BLE001  Raised by the next call: leases that nobody extends expire.
                self._failure = of_thread("extending the leases", error)
                return
            with self._lock:  # A batch that was acked or given back during the call is not lost.
                lost = [batch_id for batch_id in lost if batch_id in self._held]
            if lost:
                self._failure = LeaseLostError(
                    "lease_lost",
                    f"the leases of batches {', '.join(lost)} expired and their groups went back to the queue; "
                    "start the trainer again from its last checkpoint",
                    batches=lost,
                )
                return

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
