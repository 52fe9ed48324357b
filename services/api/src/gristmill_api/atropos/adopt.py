"""Groups that came in at the root become binary groups when a trainer leases them over /v1."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from gristmill import GroupError
from gristmill.logs import line
from gristmill_api import errors
from gristmill_api.atropos.translate import is_json, to_group
from gristmill_api.store import LeasedGroup, Store, keys

_LOG = logging.getLogger(__name__)


def foreign(groups: Sequence[LeasedGroup]) -> bool:
    """Whether any of a leased batch is Atropos' JSON."""
    return any(group.schema == "atropos" for group in groups)


async def adopt(store: Store, run_id: str, batch_id: str, groups: Sequence[LeasedGroup]) -> int:
    """Replace the JSON of a leased batch's groups by binary groups, in the store. Lease again under the same id: it is
    the batch in its new form. When some have no binary form they are dead letters, the rest is ready again, and the
    same id leases another batch. How many are dead."""
    reasons: dict[str, str] = {}
    for group in groups:
        if group.schema != "atropos":
            continue
        try:
            await _adopt(store, run_id, batch_id, group.group_id)
        except GroupError as error:
            reasons[group.group_id] = str(error)
    if not reasons:
        return 0
    for group_id, reason in reasons.items():
        _LOG.warning(line("dead", run=run_id, group=group_id, why=reason))
    arguments = [word for group_id, reason in reasons.items() for word in (group_id, f"no_binary_form: {reason}")]
    _, dead = await store.scripts.run("reject", keys.prefix(run_id), batch_id, *arguments)
    return int(dead)


async def _adopt(store: Store, run_id: str, batch_id: str, group_id: str) -> None:
    text, version = await store.queue.adoptable(run_id, group_id)
    if text is None:
        raise errors.lease_lost(run_id, [batch_id])
    if not is_json(text):
        return  # by a call at the same time
    body = await asyncio.to_thread(_binary, text, group_id, run_id, version)
    status, *_ = await store.scripts.run("adopt", keys.prefix(run_id), group_id, batch_id, body)
    if status != b"OK":
        raise errors.lease_lost(run_id, [batch_id])


def _binary(text: bytes, group_id: str, run_id: str, version: str) -> bytes:
    return to_group(text, group_id, run_id, int(group_id[1:]), version).encode()
