"""Work that one of several processes is to do, claimed by name."""

from __future__ import annotations

from gristmill_api import errors
from gristmill_api.store.calls import Calls
from gristmill_api.store.records import text

MOST_CLAIMS = 64
"""Of a run, at a time."""


class Claims:
    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def claim(self, run_id: str, name: str, holder: str, ttl_ms: int) -> str:
        """Returns who has the claim now: `holder`, or another whose claim has not run out.

        Raises ApiProblem (409) when the run has 64 others.
        """
        status, *rest = await self._calls.run("claim", run_id, name, holder, ttl_ms, MOST_CLAIMS)
        if status == "FULL":
            raise errors.too_many_claims(run_id, MOST_CLAIMS)
        return text(rest[0]) if status == "HELD" else holder
