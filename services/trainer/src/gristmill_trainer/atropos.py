"""A run whose groups come from Atropos environments: registered, then taken and leased from like any other run.

Such a run has no run settings and no permits. The environment's configuration limits how far the environment runs
ahead (`max_batches_offpolicy`), so max_staleness has no effect. Group sizes vary, so a batch is leased by sequences.
"""

from __future__ import annotations

import logging

from gristmill import ApiError, AtroposRegistration, Protocol, RunRecord, SyncClient
from gristmill_trainer.errors import TrainerError
from gristmill_trainer.settings import TrainerSettings

_LOG = logging.getLogger(__name__)


def open_run(api: SyncClient, settings: TrainerSettings, seq_len: int) -> RunRecord:
    """Registers this training for Atropos environments, which join when the trainer publishes its first weights.

    `seq_len`: tokens; environments drop sequences of this length or longer. Raises TrainerError if
    `settings.atropos_run` is not the run that is bound to the API's root.
    """
    name = settings.atropos_run
    assert name is not None
    api.register_atropos(
        AtroposRegistration(
            batch_size=settings.sequences_per_step,
            max_token_len=seq_len,
            num_steps=settings.training_steps,
            save_checkpoint_interval=settings.checkpoint_interval,
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


_REMEDY = "atropos_run must be the API's ATROPOS_RUN (`default` unless you set it)"
