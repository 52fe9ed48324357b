"""SIGTERM, and SIGHUP, which a terminal or an SSH session sends to its programs when it closes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn


def stop_on_hangup() -> None:
    """Makes SIGHUP have the effect of SIGTERM from now on. Without this, SIGHUP ends the process at once.

    A process that ignores SIGHUP continues to ignore it: `nohup` started the process. Only the main thread may set a
    handler, so a call from another thread has no effect.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _terminate)


@contextlib.contextmanager
def ending_on_signals() -> Iterator[None]:
    """Lets SIGTERM and SIGHUP raise SystemExit in the block, as SIGINT raises KeyboardInterrupt, so that it cleans up.

    Later signals are ignored, and signals that this process was started to ignore (nohup) too.
    """

    def end(number: int, frame: FrameType | None) -> NoReturn:
        for one in found:
            signal.signal(one, signal.SIG_IGN)
        raise SystemExit(128 + number)

    found = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    found = {number: before for number, before in found.items() if before != signal.SIG_IGN}
    for number in found:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, before in found.items():
            signal.signal(number, before)


def _terminate(number: int, frame: FrameType | None) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
