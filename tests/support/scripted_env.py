"""An environment without a model: takes permits, submits groups, remembers which were acknowledged.

As a process: `python -m tests.support.scripted_env API RUN HOLDER FILE [DROP_EVERY]`; FILE gets one line per
acknowledged group. DROP_EVERY 10: of ten rows, the last is dropped.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable

from tests.support.scripted_run import expected_group

from gristmill import ApiError, Client, Permit, RunState

PERMITS = 8
_SETTLED = frozenset({"permit_lost", "conflict", "finished"})
"""Answers to a submit that mean: this row now belongs to another environment. The environment service skips them
too."""


async def serve(
    client: Client, run_id: str, holder: str, acknowledged: Callable[[str], None], drop_every: int = 0
) -> None:
    """Works until the run is finished."""

    async def answer(permit: Permit) -> None:
        try:
            if drop_every and permit.row % drop_every == drop_every - 1:
                await client.return_permit(run_id, holder, permit.group_id, "same_scores")
                return
            await client.submit(expected_group(run_id, permit.group_id, holder), holder)
        except ApiError as error:
            if error.code not in _SETTLED:
                raise
        else:
            acknowledged(permit.group_id)

    await client.abandon_permits(run_id, holder)
    while True:
        grant = await client.permits(run_id, holder, PERMITS, wait=1)
        if grant.state is RunState.FINISHED:
            return
        async with asyncio.TaskGroup() as tasks:
            for permit in grant.permits:
                tasks.create_task(answer(permit))


async def _main(api: str, run_id: str, holder: str, file: str, drop_every: str = "0") -> None:
    record = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def acknowledged(group_id: str) -> None:
        os.write(record, f"{group_id}\n".encode())  # The kernel has the data, so it survives a SIGKILL of this process.

    async with Client(api, patience=60, timeout=10) as client:
        await serve(client, run_id, holder, acknowledged, int(drop_every))


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
