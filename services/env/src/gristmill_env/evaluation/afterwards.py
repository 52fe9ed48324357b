"""The final evaluation of a finished run, if a kill prevented it."""

from __future__ import annotations

import logging

from gristmill import Client, PolicyVersion, RunRecord
from gristmill_env.errors import InferenceError
from gristmill_env.evaluation.telling import SOURCE
from gristmill_env.inference import ModelServers
from gristmill_env.inference.http import ServerTroubleError

logger = logging.getLogger(__name__)


async def version_left(api: Client, record: RunRecord, server: ModelServers) -> str | None:
    """Returns the last version of the finished run, if its evaluation is missing and still possible.

    The trainer no longer publishes weights. If the model server has other weights by now, a warning names the remedy.
    """
    version = record.version
    if version is None or await api.metrics(record.run_id, SOURCE, after_step=PolicyVersion.parse(version).step - 1):
        return None
    if (record.trainer or {}).get("publisher") == "none" or (label := await _label(server)) == version:
        return version
    logger.warning(
        "the last evaluation of run %s is missing, and the model server %s, not %s; serve the final model and use "
        "`evaluate`",
        record.run_id,
        "does not tell its weights" if label is None else f"has the weights '{label}'",
        version,
    )
    return None


async def _label(server: ModelServers) -> str | None:
    try:
        return await server.weight_label()
    except (InferenceError, ServerTroubleError) as error:
        logger.debug("%s", error)  # the warning reports the missing label
        return None
