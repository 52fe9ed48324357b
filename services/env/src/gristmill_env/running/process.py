"""One checker process, as its owner sees it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time

import msgspec

from gristmill_env.symbolic.errors import CheckDied, CheckError, CheckerUnavailable, CheckOverran
from gristmill_env.symbolic.protocol import (
    HEAD,
    Broken,
    Check,
    Failed,
    Outcome,
    Ready,
    Report,
    decode_report,
    framed,
)

_MODULE = "gristmill_env.symbolic.checker"
_START_S = 120.0
"""Importing sympy takes a second; on a busy machine with a cold disk, many."""


class CheckerProcess:
    """A child that answers one check at a time. Not thread-safe: one thread owns it."""

    def __init__(self, deadline_s: float) -> None:
        """Start the child. Raises CheckerUnavailable when that fails."""
        self._deadline_s = deadline_s
        self._command = command = [sys.executable, "-P", "-m", _MODULE, str(deadline_s)]
        try:
            self._child = subprocess.Popen(
                command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        except OSError as error:
            raise CheckerUnavailable(f"no process for symbolic checks could be started: {error}") from error
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._checks, self._reports = self._child.stdin, self._child.stdout
        self._poll = select.poll()
        self._poll.register(self._reports, select.POLLIN)

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._child.poll() is None

    @property
    def pid(self) -> int:
        return self._child.pid

    def await_ready(self) -> None:
        """Wait until it is warm. Raises CheckerUnavailable when it never will be."""
        try:
            report = self._read(_START_S)
        except (OSError, EOFError, msgspec.DecodeError) as error:  # a TimeoutError is an OSError
            self.kill()
            raise CheckerUnavailable(
                f"the process for symbolic checks did not start ({_exit(self._child.returncode)}); "
                f"run `{' '.join(self._command)}` to see why"
            ) from error
        if isinstance(report, Broken):
            self.kill()
            raise CheckerUnavailable(
                f"the process for symbolic checks cannot work ({report.reason}); install math-verify in {sys.prefix}"
            )

    def ask(self, check: Check) -> Outcome:
        """Have `check` decided.

        Raises CheckOverran at the deadline and CheckDied when the process ends under it: both leave
        it dead. Raises CheckError when the check itself fails.
        """
        try:
            self._checks.write(framed(check))
            report = self._read(self._deadline_s)
        except TimeoutError:
            self.kill()
            raise CheckOverran(f"the check of {check.shown} took more than {self._deadline_s:g} s") from None
        except (OSError, EOFError, msgspec.DecodeError) as error:
            self.kill()
            raise CheckDied(
                f"the process that checked {check.shown} ended ({_exit(self._child.returncode)}); "
                "such an answer needs more memory than a check may take"
            ) from error
        if isinstance(report, Failed):
            raise CheckError(f"the check of {check.shown} failed: {report.reason}")
        assert not isinstance(report, (Ready, Broken))  # said once, before the first check
        if report.last:
            self.kill()
        return report.outcome

    def stop(self) -> None:
        """End it from another thread than its owner's, who then finds it dead."""
        self._child.kill()

    def kill(self) -> None:
        """End it now, whatever it does."""
        self._child.kill()
        self._child.wait()
        self._checks.close()
        self._reports.close()

    def _read(self, limit_s: float) -> Report:
        """The next report. Raises TimeoutError after `limit_s`, EOFError when the child has ended."""
        until = time.monotonic() + limit_s
        (size,) = HEAD.unpack(self._exactly(HEAD.size, until))
        return decode_report(self._exactly(size, until))

    def _exactly(self, size: int, until: float) -> bytes:
        read = b""
        while len(read) < size:
            if not self._poll.poll(max(0.0, until - time.monotonic()) * 1000):
                raise TimeoutError
            piece = os.read(self._reports.fileno(), size - len(read))
            if not piece:
                raise EOFError
            read += piece
        return read


def _exit(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit status {code}"
