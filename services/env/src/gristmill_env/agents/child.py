"""The process in which the user's agents run (`python -m gristmill_env.agents.child AGENT FOLDER`).

Messages are lines of JSON. The process first writes a `Report` without a number: the agent is loaded, or why not. The
owner then writes an `Order` for each rollout to stdin, and the process writes a `Report` with the order's number to
stdout when the agent has returned. All agents run at the same time: `async def` agents on one event loop, and others in
threads. What an agent prints goes to standard error.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from gristmill.errors import GristmillError
from gristmill.plugins import load_plugin
from gristmill_env.agents.task import AgentTask, Endpoint

_THREADS = 256
_LINE = 2**26
"""Most bytes of a line."""


class Order(msgspec.Struct, frozen=True):
    """Runs the agent, or ends a run."""

    number: int
    task: AgentTask | None = None
    """None: the run is cancelled."""
    endpoint: Endpoint | None = None


class Report(msgspec.Struct, frozen=True):
    """The end of a run."""

    number: int | None = None
    reward: Any = None
    code: str | None = None
    """Of the error, if the agent raised one."""
    error: str = ""


def main() -> None:
    name, folder = sys.argv[1:]
    reports = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what an agent prints must not mix with the reports
    asyncio.run(_serve(name, Path(folder), reports))


async def _serve(name: str, folder: Path, reports: Any) -> None:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(_THREADS))
    orders = asyncio.StreamReader(limit=_LINE)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    try:
        agent = load_plugin(name, folder)
        if not callable(agent):
            raise TypeError(f"{name} is {agent!r:.80}; an agent is a function: async def run(task, endpoint)")
    except Exception as error:  # noqa: BLE001  the owner tells it to the user
        reports.write(_encoded(_failed(None, error)))
        return
    reports.write(_encoded(Report()))
    running: dict[int, asyncio.Task[None]] = {}
    while line := await orders.readline():
        order = msgspec.json.decode(line, type=Order)
        if order.task is None:
            if (task := running.get(order.number)) is not None:
                task.cancel()
            continue
        running[order.number] = task = asyncio.create_task(_run(agent, order, reports))
        task.add_done_callback(functools.partial(lambda number, _: running.pop(number, None), order.number))
    for task in running.values():
        task.cancel()


async def _run(agent: Callable[..., Any], order: Order, reports: Any) -> None:
    try:
        if inspect.iscoroutinefunction(agent):
            reward = await agent(order.task, order.endpoint)
        else:
            reward = await asyncio.to_thread(agent, order.task, order.endpoint)
            if inspect.isawaitable(reward):
                reward = await reward
        report = Report(order.number, reward)
        encoded = _encoded(report)
    except asyncio.CancelledError:
        encoded = _encoded(Report(order.number, code="cancelled"))
    except Exception as error:  # noqa: BLE001  what it raises belongs to this rollout
        traceback.print_exc()
        encoded = _encoded(_failed(order.number, error))
    reports.write(encoded)


def _failed(number: int | None, error: Exception) -> Report:
    code = error.code if isinstance(error, GristmillError) else "agent_raised"
    return Report(number, code=code, error=f"{type(error).__name__}: {error}"[:1000])


def _encoded(report: Report) -> bytes:
    return msgspec.json.encode(report) + b"\n"


if __name__ == "__main__":
    main()
