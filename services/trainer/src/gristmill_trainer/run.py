"""The run that this trainer works on: how it is found, and how the trainer notices that another trainer has taken it.

A run may get its groups from Atropos environments. Such a run is registered, then taken and leased from like any other
run. It has no run settings and no permits. The environment's configuration limits how far the environment runs ahead
(`max_batches_offpolicy`), so max_staleness has no effect. Group sizes vary, so a batch is leased by sequences.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gristmill import (
    ApiError,
    ApiUnreachable,
    AtroposRegistration,
    LeaseLostError,
    LeaseSession,
    PolicyVersion,
    Protocol,
    RunRecord,
    SyncClient,
)
from gristmill.internal.logs import line
from gristmill_trainer.errors import CheckpointError, FencedError, PublishError, TrainerError
from gristmill_trainer.settings import TrainerSettings
from gristmill_trainer.stop import StopRequest

_LOG = logging.getLogger(__name__)
_REMEDY = "atropos_run must be the API's ATROPOS_RUN (`default` unless you set it)"


def wait_for_run(api: SyncClient, name: str, stop: StopRequest) -> RunRecord:
    """Waits until an environment opens a run of the stack `name`. Raises StoppedError if a stop is requested."""
    logged = False
    while True:
        run = api.open_run(wait=5.0, stack=name)
        if run is not None:
            return run
        stop.raise_if_requested()
        if not logged:
            _LOG.info("waiting for a run; the environment brings it: python -m gristmill_env --config quickstart")
            logged = True


def open_atropos_run(api: SyncClient, settings: TrainerSettings, seq_len: int) -> RunRecord:
    """Registers this training for Atropos environments, which join when the trainer publishes its first weights.

    `seq_len`: tokens; environments drop sequences of this length or longer. An environment saves its own state every
    `checkpoint_interval` steps, and not at all if the interval is a time. Raises TrainerError if
    `settings.atropos_run` is not the run that is bound to the API's root.
    """
    name, interval = settings.atropos_run, settings.checkpoint_interval
    assert name is not None
    api.register_atropos(
        AtroposRegistration(
            batch_size=settings.sequences_per_step,
            max_token_len=seq_len,
            num_steps=settings.training_steps,
            save_checkpoint_interval=interval if isinstance(interval, int) else 0,
        )
    )
    try:
        run = api.get_run(name)
    except ApiError as error:
        if error.status != 404:
            raise
        raise TrainerError(
            "run_missing", f"no run '{name}' is fed by Atropos' environments; {_REMEDY}", run=name
        ) from error
    if run.protocol is not Protocol.ATROPOS:
        raise TrainerError(
            "not_atropos", f"run '{name}' is fed over /v1, not by Atropos' environments; {_REMEDY}", run=name
        )
    _LOG.info("registered for Atropos' environments: %d sequences a step", settings.sequences_per_step)
    return run


def announce(session: LeaseSession, version: PolicyVersion) -> None:
    """Reports to the API that a version is served, which lets the environment continue."""
    session.record_version(version)
    _LOG.info(line("published", run=session.run.run_id, version=version))


def raise_if_replaced(api: SyncClient, taken: RunRecord) -> None:
    """Raises FencedError if another trainer has taken the run. `taken`: the run's record when this trainer took it.

    Does not compare incarnations, because the incarnation also changes when an environment opens the run again.
    """
    record = api.get_run(taken.run_id)
    if record.taker not in ("", taken.taker):
        raise FencedError(
            "fenced",
            f"run {taken.run_id} has another trainer: incarnation {record.incarnation} took it from this one "
            f"({taken.incarnation}). This trainer ends and leaves the run to it; start it again only if the other one "
            "is gone",
            run=taken.run_id,
            incarnation=record.incarnation,
        )


@contextmanager
def noticing_replacement(ask: Callable[[], SyncClient], taken: RunRecord) -> Iterator[None]:
    """Converts an error of the API, the model server, the leases or a checkpoint to FencedError if another trainer has
    the run.

    If a trainer was replaced, the API refuses its calls, the model server refuses its weights, its leases are lost, or
    the next trainer has removed the checkpoint that it was writing.
    `ask`: opens a client that does not wait long for an unreachable API.
    """
    try:
        yield
    except (ApiError, PublishError, LeaseLostError, CheckpointError) as error:
        try:
            with ask() as api:
                raise_if_replaced(api, taken)
        except (ApiError, ApiUnreachable) as unknown:
            _LOG.debug("the API does not say whether run %s has another trainer: %s", taken.run_id, unknown)
        except FencedError as fenced:
            raise fenced from error
        raise
