"""SIGHUP, which a terminal or an SSH session sends to its programs when it closes."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType


def stop_on_hangup() -> None:
    """Makes SIGHUP have the effect of SIGTERM from now on. Without this, SIGHUP ends the process at once.

    A process that ignores SIGHUP continues to ignore it: `nohup` started the process. Only the main thread may set a
    handler, so a call from another thread has no effect.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _terminate)


def _terminate(number: int, frame: FrameType | None) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
