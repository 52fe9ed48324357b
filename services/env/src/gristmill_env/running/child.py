"""A worker process: `python -m gristmill_env.running.child`. Its first message is an `Order`, each later one a job.

It answers jobs from stdin on stdout until stdin closes, one at a time, on its main thread, so that code which uses
signals works. The kernel ends it when a job has used up its processor time, and when nobody is there to kill it.
"""

from __future__ import annotations

import importlib
import os
import resource
import signal
import sys
from pathlib import Path
from typing import IO

from gristmill_env.running.protocol import (
    HEAD,
    Broken,
    Done,
    Failed,
    Ready,
    Report,
    decode_order,
    error_code,
    error_values,
    framed,
)

_REASON = 300


def main() -> None:
    jobs, reports = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get between the reports
    sys.stdin = Path(os.devnull).open()  # noqa: SIM115  for as long as the process runs
    order = decode_order(_next(jobs) or b"")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the pool owner's to handle
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # death, for which no Python code is needed
    os.nice(order.niceness)
    if order.memory:
        resource.setrlimit(resource.RLIMIT_AS, (order.memory, order.memory))
    if order.path is not None:
        sys.path[:] = order.path
    module, _, factory = order.target.partition(":")
    try:
        work = getattr(importlib.import_module(module), factory)(order.settings)
    except Exception as error:  # noqa: BLE001  the owner tells it to whoever asks
        _say(reports, Broken(_reason(error), error_code(error), error_values(error)))
        return
    _say(reports, Ready())
    last = False
    while not last and (job := _next(jobs)) is not None:
        signal.setitimer(signal.ITIMER_PROF, order.cpu)
        signal.setitimer(signal.ITIMER_REAL, 2 * order.wall)  # in case that nobody watches any more
        try:
            report: Report = Done(work(job), last := order.grown is not None and _resident() > order.grown)
        except Exception as error:  # noqa: BLE001  what it raises belongs to this job
            report = Failed(_reason(error), error_code(error), error_values(error))
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _say(reports, report)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_REASON]


def _resident() -> int:
    """Bytes in memory now. Not ru_maxrss: over an exec that keeps what the parent had, which may be a large worker."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except FileNotFoundError:  # not Linux: the memory limit ends the process in time
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _next(jobs: IO[bytes]) -> bytes | None:
    """The next message; None when the owner has closed the pipe, or died."""
    head = jobs.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    (size,) = HEAD.unpack(head)
    body = jobs.read(size)
    return body if len(body) == size else None


def _say(reports: IO[bytes], report: Report) -> None:
    reports.write(framed(report))
    reports.flush()


if __name__ == "__main__":
    main()
