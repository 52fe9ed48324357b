"""Permits: permission to generate the group of one dataset row. Permits bound how far generation runs ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gristmill import Permit, PermitGrant, RowResult, RunState
from gristmill_api import errors
from gristmill_api.settings import Limits
from gristmill_api.store.keys import milliseconds, row_of
from gristmill_api.store.records import result_words, text, version
from gristmill_api.store.scripts import Scripts

MOST_REASONS: Final = 64
"""Drop reasons per run that are counted by name."""


@dataclass(frozen=True)
class Renewal:
    renewed: int
    lost: list[str]
    """Ids of permits that were asked for and that the holder no longer has."""


class Permits:
    def __init__(self, scripts: Scripts, limits: Limits) -> None:
        self._scripts = scripts
        self._limits = limits

    async def grant(self, run_id: str, holder: str, count: int) -> PermitGrant:
        """Returns up to `count` permits, at once. The list is empty if other holders have all of the run's capacity."""
        status, *rest = await self._scripts.call(
            "permits",
            run_id,
            holder,
            count,
            milliseconds(self._limits.permit_ttl_s),
            milliseconds(self._limits.env_ttl_s),
        )
        if status == "PROTOCOL":
            raise errors.no_permits(run_id)
        state, incarnation, step, creation, *ids = rest
        granted = [group_id.decode() for group_id in ids]
        return PermitGrant(
            permits=[Permit(group_id=group_id, row=row_of(group_id)) for group_id in granted],
            state=RunState(state.decode()),
            version=version(incarnation, step),
            creation=text(creation),
        )

    async def renew(self, run_id: str, holder: str, group_ids: Sequence[str] | None) -> Renewal:
        """Keep the named permits alive, or all of the holder's.

        If the answer that granted a permit was lost, the holder does not name the permit, and the permit expires.
        """
        which = "all" if group_ids is None else "named"
        _, renewed, *lost = await self._scripts.call(
            "renew", run_id, holder, milliseconds(self._limits.permit_ttl_s), which, *(group_ids or ())
        )
        return Renewal(int(renewed), [group_id.decode() for group_id in lost])

    async def return_permit(
        self, run_id: str, holder: str, group_id: str, reason: str, result: RowResult | None = None
    ) -> bool:
        """Return one permit. With the reason "abandoned" it is issued again; any other reason drops the group.

        `result`: of the dropped group. False: an earlier call returned the permit.
        """
        (status,) = await self._scripts.call(
            "return_permits", run_id, holder, group_id, reason, MOST_REASONS, result_words(result)
        )
        if status == "LOST":
            raise errors.permit_lost(run_id, group_id, f"{holder!r} does not hold it")
        if status == "SUBMITTED":
            raise errors.conflict(run_id, group_id, "was submitted already")
        return bool(status == "OK")

    async def release_all(self, run_id: str, holder: str) -> int:
        """Return all permits of the holder; they are issued again. Returns how many there were."""
        _, count = await self._scripts.call("return_permits", run_id, holder, "")
        return int(count)
