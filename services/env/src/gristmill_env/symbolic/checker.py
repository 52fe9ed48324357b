"""A checker process: `python -m gristmill_env.symbolic.checker DEADLINE_S`.

It answers checks from stdin on stdout until stdin closes, one at a time, on its main thread. It
holds back: lower priority, a memory limit, and a timer of the kernel's that ends it when one check
goes on for twice the deadline, should nobody be there any more to kill it.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path
from typing import IO

from gristmill_env.symbolic.protocol import HEAD, Broken, Failed, Ready, Report, Verdict, decode_check, framed

_MEMORY = 1 << 30
"""Address space, bytes. sympy with Math-Verify takes about 0.2 GB of it."""
_NICENESS = 5
_GROWN = 512 << 20
"""Resident bytes at which the process asks to be replaced: parsers' caches only grow."""
_REASON = 300


def main() -> None:
    checks, reports = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get between the reports
    deadline_s = float(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the pool owner's to handle
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    try:
        from gristmill_env.symbolic.equality import decide, warm_up
    except ImportError as error:
        _say(reports, Broken(f"{type(error).__name__}: {error}"))
        return
    warm_up()
    _say(reports, Ready())
    last = False
    while not last and (body := _next(checks)):
        check = decode_check(body)
        signal.setitimer(signal.ITIMER_REAL, 2 * deadline_s)  # SIGALRM's default is death: no Python code is needed
        try:
            outcome = decide(check)
        except Exception as error:  # noqa: BLE001  whatever sympy raises belongs to this check
            report: Report = Failed(f"{type(error).__name__}: {error}"[:_REASON])
        else:
            last = _resident() > _GROWN
            report = Verdict(outcome, last)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _say(reports, report)


def _resident() -> int:
    """Bytes in memory now. Not ru_maxrss: over an exec that keeps what the parent had, which may be a large worker."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except FileNotFoundError:  # no Linux: nobody tells, and the memory limit ends the process in time
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _next(checks: IO[bytes]) -> bytes | None:
    """The next message; None when the pool has closed the pipe, or died."""
    head = checks.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    (size,) = HEAD.unpack(head)
    body = checks.read(size)
    return body if len(body) == size else None


def _say(reports: IO[bytes], report: Report) -> None:
    reports.write(framed(report))
    reports.flush()


if __name__ == "__main__":
    main()
