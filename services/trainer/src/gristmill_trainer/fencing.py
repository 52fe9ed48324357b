"""Whether another trainer has taken the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gristmill import ApiError, ApiUnreachable, SyncClient
from gristmill_trainer.errors import FencedError, LeaseLostError, PublishError

_LOG = logging.getLogger(__name__)


def raise_if_replaced(api: SyncClient, run_id: str, incarnation: int) -> None:
    """Raises FencedError if the run's trainer is not the one of `incarnation`."""
    found = api.get_run(run_id).incarnation
    if found != incarnation:
        raise FencedError(
            f"run {run_id} has another trainer: incarnation {found} took it from this one ({incarnation}). This "
            "trainer ends and leaves the run to it; start it again only if the other one is gone"
        )


@contextmanager
def noticing_replacement(ask: Callable[[], SyncClient], run_id: str, incarnation: int) -> Iterator[None]:
    """Within, an error of the API, the model server or the leases is FencedError if the run has another trainer.

    A trainer that was replaced finds out in many ways: the API refuses its calls, the model server refuses its weights,
    its leases are gone. `ask`: opens a client that does not wait long for an API that is away.
    """
    try:
        yield
    except (ApiError, PublishError, LeaseLostError) as error:
        try:
            with ask() as api:
                raise_if_replaced(api, run_id, incarnation)
        except (ApiError, ApiUnreachable) as unknown:
            _LOG.debug("the API does not say whether run %s has another trainer: %s", run_id, unknown)
        except FencedError as fenced:
            raise fenced from error
        raise
