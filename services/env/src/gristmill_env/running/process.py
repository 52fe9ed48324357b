"""The owner's side of one worker process."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

import msgspec

from gristmill_env.running.errors import JobDied, JobFailed, JobOverran, NoProcess
from gristmill_env.running.protocol import HEAD, Broken, Done, Failed, Order, Report, decode_report, framed

_MODULE = "gristmill_env.running.child"
_START_S = 120.0
"""Seconds to start. Importing sympy takes one second, but many on a busy machine with a cold disk cache."""


class WorkerProcess:
    """A child process that does one job at a time. Not thread-safe: one thread owns it."""

    def __init__(self, order: Order, what: str, *, quiet: bool = False) -> None:
        """Starts the child. `what`: its purpose, for messages. `quiet`: the child's standard error is discarded.

        Raises NoProcess when the child cannot be started.
        """
        self._order, self._what = order, what
        self._command = command = [sys.executable, "-P", "-m", _MODULE]
        try:
            self._child = subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL if quiet else None,
                start_new_session=True,  # its own child processes are in its group and are killed with it
            )
        except OSError as error:
            raise NoProcess(
                "process_not_started",
                f"no process for {what} could be started: {error}",
                what=what,
                error=type(error).__name__,
            ) from error
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._jobs, self._reports = self._child.stdin, self._child.stdout
        self._poll = select.poll()
        self._poll.register(self._reports, select.POLLIN)

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._child.poll() is None

    @property
    def pid(self) -> int:
        return self._child.pid

    def await_ready(self) -> None:
        """Sends the order, and waits until the process is warm. Raises NoProcess when the process cannot start."""
        try:
            self._send(framed(self._order))
            report = self._read(_START_S)
        except (OSError, EOFError, msgspec.DecodeError) as error:  # a TimeoutError is an OSError
            self.kill()
            raise NoProcess(
                "process_not_started",
                f"the process for {self._what} did not start ({_exit(self._child.returncode)}); is there memory left, "
                f"and does `{' '.join(self._command)} < /dev/null` work?",
                what=self._what,
                returncode=self._child.returncode,
            ) from error
        if isinstance(report, Broken):
            self.kill()
            raise NoProcess(
                report.code or "process_broken",
                f"the process for {self._what} cannot work: {report.reason}",
                **report.values,
            )

    def ask(self, job: bytes, shown: str) -> bytes:
        """Runs `job` and returns its result. `shown`: the job's name in messages.

        Raises JobOverran when the job exceeds a limit, and JobDied when the process exits during the job. After both
        errors the process is dead. Raises JobFailed when the job itself fails.
        """
        try:
            self._send(framed(job))
            report = self._read(self._order.wall)
        except TimeoutError:
            self.kill()
            wall = self._order.wall
            raise JobOverran(
                "job_overran", f"{shown} took more than {wall:g} s", job=shown, limit="wall", seconds=wall
            ) from None
        except (OSError, EOFError, msgspec.DecodeError) as error:
            self.kill()
            if self._child.returncode == -signal.SIGPROF:
                cpu = self._order.cpu
                raise JobOverran(
                    "job_overran",
                    f"{shown} took more than {cpu:g} s of processor time",
                    job=shown,
                    limit="cpu",
                    seconds=cpu,
                ) from None
            raise JobDied(
                "job_died",
                f"the process of {shown} ended under it ({_exit(self._child.returncode)}); "
                "it may have needed more memory than there is",
                job=shown,
                returncode=self._child.returncode,
            ) from error
        if isinstance(report, Failed):
            raise JobFailed(report.code or "job_failed", f"{shown} failed: {report.reason}", **report.values)
        assert isinstance(report, Done)
        if report.last:
            self.kill()
        return report.result

    def stop(self) -> None:
        """Kills the process from a thread other than its owner's. The owner then finds the process dead."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the process has ended
            os.killpg(self._child.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kills the process and all processes that it has started, now."""
        self.stop()
        self._child.wait()
        self._jobs.close()
        self._reports.close()

    def _send(self, message: bytes) -> None:
        view = memoryview(message)
        while view:
            view = view[self._jobs.write(view) or 0 :]

    def _read(self, limit_s: float) -> Report:
        """Returns the next report. Raises TimeoutError after `limit_s` seconds, EOFError when the child has ended."""
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
