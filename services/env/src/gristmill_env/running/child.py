"""A worker process: `python -m gristmill_env.running.child`. Its first message is an `Order`, each later one a job.

The process reads jobs from stdin and writes reports to stdout, one job at a time, until stdin closes. Jobs run on the
main thread, so that code which uses signals works. The kernel kills the process when a job uses up its processor time.
If no owner kills an overdue process, the kernel kills it after twice the elapsed-time limit.
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
    os.dup2(2, 1)  # output that a library prints must not mix with the reports
    sys.stdin = Path(os.devnull).open()  # noqa: SIM115  for as long as the process runs
    order = decode_order(_next(jobs) or b"")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool's owner handles Ctrl-C
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the kernel kills the process without running Python code
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
        signal.setitimer(signal.ITIMER_REAL, 2 * order.wall)  # in case the owner no longer watches
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
    """Returns the bytes in memory now. Does not use ru_maxrss, because exec preserves the parent's value, which may
    be a large worker's."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except FileNotFoundError:  # not Linux: the memory limit ends the process in time
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _next(jobs: IO[bytes]) -> bytes | None:
    """Returns the next message; None when the owner has closed the pipe or has exited."""
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
