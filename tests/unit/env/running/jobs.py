"""Jobs of worker processes that misbehave on request."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from gristmill_env.errors import RewardError


def worker(settings: bytes) -> Callable[[bytes], bytes]:
    """Returns a function that does the named job, and returns the settings and the job."""
    if settings == b"broken":
        raise ValueError("there is nothing to work with")
    if settings == b"refused":
        _refuse("")

    def work(job: bytes) -> bytes:
        what, _, argument = job.decode().partition(":")
        _DO[what](argument)
        return settings + b" " + job

    return work


def _compute(seconds: str) -> None:
    until = time.process_time() + float(seconds)
    while time.process_time() < until:
        pass


def _stick_in_c(_: str) -> None:
    re.match("(a+)+$", "a" * 60 + "b")  # takes forever, and never releases the interpreter's lock


def _raise(_: str) -> None:
    raise KeyError("mark")


def _refuse(_: str) -> None:
    raise RewardError("picture_missing", "no picture", path=Path("/a/b"), sizes=(1, 2), of={1: None})


def _print(text: str) -> None:
    print(text)  # noqa: T201
    sys.stdout.flush()
    os.write(1, text.encode())


def _child(file: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(file, "w") as out:  # noqa: PTH123
        out.write(str(child.pid))
    time.sleep(600)


def _alarm(_: str) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_IGN)  # only the main thread may
    signal.alarm(1)
    signal.alarm(0)


_DO: dict[str, Callable[[str], object]] = {
    "echo": str,
    "sleep": lambda seconds: time.sleep(float(seconds)),
    "compute": _compute,
    "stick in C": _stick_in_c,
    "raise": _raise,
    "refuse": _refuse,
    "exit": lambda code: os._exit(int(code)),
    "print": _print,
    "child": _child,
    "alarm": _alarm,
}
