"""An agent elsewhere: it asks a gateway for tasks, works on sixteen of them at a time, and reports their rewards.

python elsewhere.py http://127.0.0.1:9100

After `make secure` the gateway gives tasks only to programs with the token that GRISTMILL_AGENT_TOKEN_FILE names.
"""

import asyncio
import contextlib
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
from two_steps import run

AT_A_TIME = 16
PATIENCE = 120
"""Seconds for which the gateway may be away. Then the run has ended."""


async def work(gateway):
    """Works on one task after another."""
    while given := await ask(gateway, "/agent/task"):
        if given.status_code == 401:
            sys.exit(given.text)
        if given.status_code == 200:  # 204: no task now
            task, endpoint = (SimpleNamespace(**given.json()[name]) for name in ("task", "endpoint"))
            await ask(gateway, f"/s/{endpoint.key}/reward", json=await result(task, endpoint))


async def ask(gateway, path, **body):
    """Repeats a request while the gateway is away. Returns None if it has been away for PATIENCE seconds."""
    began = time.monotonic()
    while time.monotonic() - began < PATIENCE:
        with contextlib.suppress(httpx.TransportError):
            given = await gateway.post(path, **body)
            if given.status_code != 503:  # 503: the rollout continues in a moment
                return given
        await asyncio.sleep(1)
    return None


async def result(task, endpoint):
    """Returns the body of the report."""
    try:
        return {"reward": await run(task, endpoint)}
    except Exception as error:  # noqa: BLE001  the gateway tells it to the user
        return {"error": repr(error)}


def token():
    """Returns the header with the token for tasks; none if the file is empty or not set."""
    file = os.environ.get("GRISTMILL_AGENT_TOKEN_FILE")
    word = Path(file).read_text().strip() if file else ""
    return {"Authorization": f"Bearer {word}"} if word else {}


async def main():
    async with httpx.AsyncClient(base_url=sys.argv[1], headers=token(), timeout=60) as gateway:  # noqa: TID251
        await asyncio.gather(*(work(gateway) for _ in range(AT_A_TIME)))


asyncio.run(main())
