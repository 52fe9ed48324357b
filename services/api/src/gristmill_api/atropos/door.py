"""What the root's handlers work with."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Request

from gristmill_api.atropos.delivery import Deliveries
from gristmill_api.atropos.patience import Patience
from gristmill_api.atropos.queue import Queue
from gristmill_api.context import Context


class Door:
    def __init__(self, ctx: Context, run_id: str, *, archive: bool) -> None:
        self.metrics = ctx.metrics
        self.queue = Queue(ctx.store, ctx.limits, run_id, archive=archive)
        self.patience = Patience(ctx, run_id)
        self.deliveries = Deliveries(self.queue, self.patience)


def _door(request: Request) -> Any:
    return request.app.state.atropos


AtDoor = Annotated[Door, Depends(_door)]
