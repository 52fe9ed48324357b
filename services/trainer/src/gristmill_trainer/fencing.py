"""Detection of another trainer that has taken the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gristmill import ApiError, ApiUnreachable, RunRecord, SyncClient
from gristmill_trainer.errors import FencedError, LeaseLostError, PublishError

_LOG = logging.getLogger(__name__)


def raise_if_replaced(api: SyncClient, taken: RunRecord) -> None:
    """Raises FencedError if another trainer has taken the run. `taken`: the run's record when this trainer took it.

    Does not compare incarnations, because the incarnation also changes when an environment opens the run again.
    """
    found = api.get_run(taken.run_id)
    if found.taker not in ("", taken.taker):
        raise FencedError(
            "fenced",
            f"run {taken.run_id} has another trainer: incarnation {found.incarnation} took it from this one "
            f"({taken.incarnation}). This trainer ends and leaves the run to it; start it again only if the other one "
            "is gone",
            run=taken.run_id,
            incarnation=found.incarnation,
        )


@contextmanager
def noticing_replacement(ask: Callable[[], SyncClient], taken: RunRecord) -> Iterator[None]:
    """Converts an error of the API, the model server or the leases to FencedError if another trainer has the run.

    If a trainer was replaced, the API refuses its calls, the model server refuses its weights, or its leases are lost.
    `ask`: opens a client that does not wait long for an unreachable API.
    """
    try:
        yield
    except (ApiError, PublishError, LeaseLostError) as error:
        try:
            with ask() as api:
                raise_if_replaced(api, taken)
        except (ApiError, ApiUnreachable) as unknown:
            _LOG.debug("the API does not say whether run %s has another trainer: %s", taken.run_id, unknown)
        except FencedError as fenced:
            raise fenced from error
        raise
