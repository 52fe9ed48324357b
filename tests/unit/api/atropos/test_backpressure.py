"""A request that waits for room keeps only its own groups in memory, and only while it waits."""

from __future__ import annotations

import gc
import weakref
from unittest.mock import create_autospec

import pytest

from gristmill_api import errors
from gristmill_api.atropos.backpressure import Backpressure
from gristmill_api.context import Context
from gristmill_api.errors import ApiProblem
from gristmill_api.metrics import Metrics
from gristmill_api.notifications import Notifications
from gristmill_api.settings import Limits
from gristmill_api.store import Store


class Body:
    """The data of a waiting request."""


async def here() -> bool:
    return False


@pytest.fixture
def backpressure() -> Backpressure:
    return Backpressure(Context(Limits(max_wait_s=0.01), create_autospec(Store), Notifications(), Metrics()), "run-1")


@pytest.mark.slow
async def test_backpressure_keeps_no_reference_to_a_request_after_its_wait(backpressure: Backpressure) -> None:
    """The memory is freed at once, not when the garbage collector runs, which knows nothing of the megabytes behind a
    name."""
    body = Body()
    alive = weakref.ref(body)

    async def refuse(_held: Body = body) -> None:
        raise errors.store_full("3 bytes are stored.")

    gc.disable()
    try:
        with pytest.raises(ApiProblem) as refused:
            await backpressure.retry(refuse, here, size=3)
        assert (refused.value.code, refused.value.status, refused.value.retry_after) == ("store_full", 503, 2)
        del refused, refuse, body
        assert alive() is None
    finally:
        gc.enable()
