"""The run that environments of Atropos' feed: registered, then taken and leased from like any other.

Such a run has no settings of its own and no permits: an environment says in its own configuration how far it may run
ahead (`max_batches_offpolicy`), and sizes of groups vary. So a step's batch is leased by sequences, and max_staleness
bounds nothing.
"""

from __future__ import annotations

import logging

from gristmill import ApiError, AtroposRegistration, Protocol, RunRecord, SyncClient
from gristmill_trainer.errors import TrainerError
from gristmill_trainer.settings import TrainerSettings

_LOG = logging.getLogger(__name__)


def open_run(api: SyncClient, settings: TrainerSettings, seq_len: int) -> RunRecord:
    """Tell Atropos' environments of this training. They come in when it publishes its first weights.

    `seq_len`: tokens; environments drop what is as long or longer. Raises TrainerError when `settings.atropos_run` is
    not the run that the API's root is bound to.
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
