"""Records the number of rows of a run's data set, from which the order of the rows is computed."""

from __future__ import annotations

import logging

from gristmill import Client

logger = logging.getLogger(__name__)

ROWS = "data.rows"
"""Source of the metrics row at step 0 that holds the number."""


async def tell_row_count(api: Client, run_id: str, label: str, rows: int) -> None:
    """Records the number with the run; warns if the number was different before. `label`: names the data set."""
    before = next((int(row.values["rows"]) for row in await api.metrics(run_id, ROWS)), None)
    if before == rows:
        return
    if before is not None:
        logger.warning(
            "%s has %d rows; it had %d when run %s was last served. The order of the rows is computed from their "
            "number, so from here on some come again or are left out of their epoch; put the old data back, or give "
            "the run with the new ones another name",
            label,
            rows,
            before,
            run_id,
        )
    await api.report_metrics(run_id, ROWS, 0, {"rows": rows})
