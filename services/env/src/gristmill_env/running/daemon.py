"""Threads that delay no exit of this process, whatever they do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


def loop_in_thread(name: str) -> asyncio.AbstractEventLoop:
    """Returns an event loop that runs in a daemon thread of this name, for as long as the process runs."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=name, daemon=True).start()
    return loop


class DaemonExecutor(ThreadPoolExecutor):
    """Starts a daemon thread for each call. asyncio accepts only a ThreadPoolExecutor, and Python joins the threads of
    a plain ThreadPoolExecutor at exit. A hanging disk write would then keep a stopped process alive."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function(*arguments, **named)
            except BaseException as error:  # noqa: BLE001  it is the caller's
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=work, name="executor", daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Returns without waiting for any thread."""
