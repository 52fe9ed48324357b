"""The objects that the route handlers of Atropos' protocol use."""

from __future__ import annotations

import logging
from typing import Annotated, Any, Final

from fastapi import Depends, Request

from gristmill.logs import line
from gristmill_api.atropos.backpressure import Backpressure
from gristmill_api.atropos.delivery import Deliveries
from gristmill_api.atropos.fast_parse import Scored
from gristmill_api.atropos.queue import Queue
from gristmill_api.context import Context

_LOG = logging.getLogger(__name__)
_REPORTS: Final = 4096
"""Reports that are remembered. Clients choose the numbers of environments."""


class AtroposContext:
    def __init__(self, ctx: Context, run_id: str) -> None:
        self.metrics = ctx.metrics
        self.queue = Queue(ctx.store, ctx.limits, run_id)
        self.backpressure = Backpressure(ctx, run_id)
        self.deliveries = Deliveries(self.queue, self.backpressure)
        self._left_out: set[tuple[int | None, str]] = set()

    def report_left_out(self, group: Scored) -> None:
        """Log the fields that a stored group lacks because they did not fit, once per environment and field."""
        new = [name for name in group.left_out if (group.env_id, name) not in self._left_out]
        if not new:
            return
        if len(self._left_out) > _REPORTS:
            self._left_out.clear()
        self._left_out |= {(group.env_id, name) for name in new}
        why = "their lengths or values do not fit the tokens; groups are stored without them and counted in the status"
        _LOG.warning(line("left_out", run=self.queue.run_id, env=group.env_id, fields=",".join(new), why=why))


# async, although it awaits nothing: FastAPI runs a plain function in a thread.
async def _atropos_context(request: Request) -> Any:
    return request.app.state.atropos


AtroposCtx = Annotated[AtroposContext, Depends(_atropos_context)]
