"""Starts, watches and stops the processes of a local stack. Merges their output and keeps it in log files."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import http.client
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from types import FrameType, TracebackType
from typing import TypeVar

from gristmill import GristmillError
from gristmill_view.phases import EXAMINED

T = TypeVar("T")

# A log line of Gristmill or vLLM with its level, an error of Gristmill's commands, or the last line of a traceback.
STARTED = "--- started"
"""The begin of the line with which a start of a service begins in its log."""
ENDED = "--- ended"
"""The begin of the line with which the launcher ends the log of a service that has ended."""
_ERROR = re.compile(
    r"^\S+ +\w+ +(?:ERROR|CRITICAL) +(?P<ours>.*)|\b(?:ERROR|CRITICAL)\b:? *(?P<theirs>.*)"
    r"|^(?:error(?: \[\w+\])?|gristmill-model): (?P<message>.*)|^(?P<raised>[\w.]*(?:Error|Exception): .*)"
)
# Lines of vLLM that look like errors and are harmless. At every reload vLLM warns that no checkpoint holds the rotary
# embedding's tables, which vLLM computes. At its end Triton's extension lists all of its objects as leaked.
_HARMLESS = re.compile(
    r"RotaryEmbedding: Failed to load weights"
    r"|^nanobind: |^ - (?:leaked |\.\.\. skipped remainder)|^See https://nanobind\."
)
WENT_WELL = re.compile(rf"{ENDED}|(?:\d\d:\d\d:\d\d \S+ +|\([^)]*\) )?(?:DEBUG|INFO)\b")
"""The begin of a log line of Gristmill, vLLM or uvicorn about work that went well, or about an end."""
_PIECE_BYTES = 64 * 1024
"""Read at once of a line. The log receives the rest of a longer line as further lines, and nothing else receives it."""
_SERVERS = frozenset({"redis", "api", "model"})
_WITHOUT_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)
_PR_SET_PDEATHSIG = 1
GRACE = 20.0
"""Seconds between SIGTERM and SIGKILL of a service."""


class LocalStackError(GristmillError):
    """A service of the stack did not start, or ended too early."""


class StopReceived(Exception):
    """A stop signal has arrived. It is not a failure, so it is not a GristmillError."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


class StopSignals:
    """Counts SIGINT, SIGTERM and SIGHUP.

    The handler never raises an exception, because an exception at an arbitrary place could leave a started process
    behind. Waits call `raise_if_any` instead. A stop ignores the second signal, because a signal often arrives twice:
    `timeout make local` sends it to make and to the launcher, and make forwards it. The third signal kills.
    """

    _KILL = 3

    def __init__(self) -> None:
        """Handles the signals from now on, except those that this process was started to ignore (nohup)."""
        self._numbers: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._note)

    @property
    def kills(self) -> bool:
        """Whether services are to be killed without a grace period."""
        return len(self._numbers) >= self._KILL

    def raise_if_any(self) -> None:
        """Raises StopReceived if a signal has arrived."""
        if self._numbers:
            raise StopReceived(self._numbers[0])

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._numbers.append(number)
        if number == signal.SIGHUP:
            _leave_terminal()


def _leave_terminal() -> None:
    """Discards output to a terminal that was closed, because every write to it fails."""
    for stream in (1, 2):
        if stat.S_ISCHR(os.fstat(stream).st_mode):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream)
            os.close(null)


@dataclass
class Service:
    """A process that the stack started. The process leads a separate process group."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path | None
    reader: threading.Thread = field(init=False)
    last_error: str = ""
    """The last line that reports an error, without time and level."""
    last_line: str = ""
    echoed: bool = True
    """Whether the stack shows the output. The log file receives the output in any case."""
    ready: bool = False
    """Whether `LocalStack.wait_until` saw the service ready, or it printed `ready_text`."""
    ready_text: str | None = None
    grace: float = GRACE
    """Seconds between SIGTERM and SIGKILL."""

    @property
    def exit_code(self) -> int | None:
        return self.process.poll()

    def failure(self) -> LocalStackError:
        """Returns the error of a service that ended too early, with the service's last error and the log's path."""
        code = self.process.wait()
        self.reader.join(timeout=5)
        text, values = self._last_words()
        if code < 0:
            name = signal.Signals(-code).name
            why = ", as the system does when memory runs out" if name == "SIGKILL" else ""
            return LocalStackError(
                "service_killed",
                f"{self.name} was killed by signal {-code} ({name}{why}); its last line: {text}",
                exit_code=code,
                signal=name,
                **values,
            )
        return LocalStackError(
            "service_ended", f"{self.name} ended with exit code {code}: {text}", exit_code=code, **values
        )

    def late(self, seconds: float) -> LocalStackError:
        """Returns the error of a service that runs and is not ready."""
        text, values = self._last_words()
        return LocalStackError(
            "service_not_ready", f"{self.name} was not ready after {seconds:.0f} s: {text}", seconds=seconds, **values
        )

    def _last_words(self) -> tuple[str, dict[str, object]]:
        """Returns the last error, or else the last line of the output, with the log's path, and the error's values."""
        text = self.last_error or self.last_line or "it printed nothing"
        values: dict[str, object] = {"service": self.name, "last_error": text, "log": self.log}
        return text + (f" (log: {self.log})" if self.log else ""), values

    def stop(self, grace: float, hurry: Callable[[], bool] | None = None) -> bool:
        """Sends SIGTERM to the process and waits up to `grace` seconds. Then sends SIGKILL to its whole group.

        `hurry`: ends the wait if it returns True. Returns whether the process ended without SIGKILL.
        """
        deadline = time.monotonic() + grace
        if self.process.poll() is None:
            self.process.terminate()
        while (ended := self.process.poll() is not None) is False:
            if time.monotonic() > deadline or (hurry is not None and hurry()):
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.1)
        # A server's workers are in its process group and may outlive the server.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.reader.join(timeout=5)
        return ended


class LocalStack:
    """A context that starts services in order and stops them in reverse order."""

    def __init__(
        self,
        say: Callable[[str, str], None] | None = None,
        logs: Path | None = None,
        complain: Callable[[str], None] | None = None,
        signals: StopSignals | None = None,
    ) -> None:
        """`say(name, line)` receives every line of output. The default prints the line after the service's name.

        `logs`: a folder in which each service's output is appended to <name>.log. Known harmless lines are then only in
        the file. `complain` receives messages of the stack itself; the default prints them to standard error.
        `signals`: a stop signal ends `wait_until`, and only the third one shortens `stop`. The services then also stop
        when this process is killed (on Linux), because the next start needs their ports and files.
        """
        self._say = say or print_line
        self._complain = complain or _print_error
        self._logs = logs
        self._signals = signals
        self._services: list[Service] = []
        self._borrowed = contextlib.ExitStack()
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)

    @property
    def services(self) -> Sequence[Service]:
        """The services that were started and not stopped, in the order of their starts."""
        return tuple(self._services)

    def start(
        self,
        name: str,
        command: Sequence[str],
        environ: Mapping[str, str] | None = None,
        *,
        grace: float = GRACE,
        ready_text: str | None = None,
        keeps: Sequence[int] = (),
    ) -> Service:
        """Starts a process with `environ` added to this process' environment. `keeps`: descriptors that the process
        inherits. The other options are `Service`'s."""
        log = None if self._logs is None else self._logs / f"{name}.log"
        if log is not None:
            log.open("a").close()  # An error of the file is raised here, not in the thread that reads the output.
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8", **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=keeps,
            start_new_session=True,  # Only the launcher receives Ctrl-C, and it stops the services in order.
            preexec_fn=functools.partial(_stop_with_parent, os.getpid()) if self._signals is not None else None,
        )
        service = Service(name, process, log)
        service.grace, service.ready_text = grace, ready_text
        service.reader = threading.Thread(target=self._read, args=(service,), daemon=True)
        self._services.append(service)
        service.reader.start()
        return service

    def borrow(self, resource: contextlib.AbstractContextManager[T]) -> T:
        """Enters a context that ends when all services have stopped. Returns its value."""
        return self._borrowed.enter_context(resource)

    def wait_until(self, service: Service, ready: Callable[[], bool], timeout: float) -> None:
        """Waits until `ready()`. Raises LocalStackError if the process ends first or after `timeout` seconds.

        Raises StopReceived after a stop signal.
        """
        deadline = time.monotonic() + timeout
        while True:
            self.raise_if_stopped()
            ended = service.exit_code  # read before ready(): a process may become ready by ending
            if ready():
                service.ready = True
                return
            if ended is not None:
                raise service.failure()
            if time.monotonic() > deadline:
                raise service.late(timeout)
            time.sleep(0.2)

    def raise_if_stopped(self) -> None:
        """Raises StopReceived after a stop signal."""
        if self._signals is not None:
            self._signals.raise_if_any()

    def stop(self) -> None:
        """Stops all services in the reverse order of their starts.

        If there are log files, only these receive the servers' output from then on. A shutdown prints many lines, which
        contain nothing about the run.
        """
        late: list[str] = []
        signals = self._signals
        hurry = None if signals is None else lambda: signals.kills
        while self._services:
            service = self._services[-1]
            service.echoed = service.log is None or service.name not in _SERVERS
            if not service.stop(service.grace, hurry):
                late.append(service.name)
            self._services.pop()
        self._borrowed.close()
        if late:  # Reported when every process has ended, because the output may fail.
            self._complain(f"killed, because they did not stop in time: {', '.join(late)}")

    def __enter__(self) -> LocalStack:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _read(self, service: Service) -> None:
        assert service.process.stdout is not None
        with contextlib.ExitStack() as closing:
            log: FileIO | None = None
            if service.log is not None:
                log = closing.enter_context(FileIO(service.log, "a"))
                started = time.strftime("%Y-%m-%d %H:%M:%S")
                log = self._keep(service, log, f"{STARTED} {started}, process {service.process.pid}")
            begins = True
            for raw in iter(functools.partial(service.process.stdout.readline, _PIECE_BYTES), b""):
                text = raw.decode(errors="replace").rstrip("\n")
                log = self._keep(service, log, text)
                begun, begins = begins, raw.endswith(b"\n")
                if not begun:
                    continue
                head = text[:EXAMINED]
                service.ready = service.ready or (service.ready_text is not None and service.ready_text in head)
                if service.log is not None and _HARMLESS.search(head):
                    continue
                if match := _ERROR.search(head):
                    service.last_error = next(part for part in match.groups() if part is not None) or head
                service.last_line = head.strip() or service.last_line
                if service.echoed:
                    try:
                        self._say(service.name, text)
                    except (OSError, ValueError) as error:  # Nobody reads the output; the log still receives it.
                        service.echoed = False
                        log = self._keep(service, log, f"--- the launcher's output failed: {error}")
            self._keep(service, log, f"{ENDED} {time.strftime('%Y-%m-%d %H:%M:%S')}")

    def _keep(self, service: Service, log: FileIO | None, text: str) -> FileIO | None:
        """Appends a line to the log. Returns None after an error, such as a full disk: the service must not block."""
        try:
            if log is not None:
                log.write(text.encode() + b"\n")
        except OSError as error:
            self._say(service.name, f"{service.log} cannot be written any more: {error}")
            return None
        return log


def _stop_with_parent(parent: int) -> None:
    """Lets the kernel send SIGTERM to this process when the thread that started it ends.

    That is the main thread of the launcher, because only a main thread can have StopSignals. `parent`: the launcher's
    process, which may have ended before this call.
    """
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)


def print_line(name: str, text: str) -> None:
    """Prints a line of a service's output after the service's name."""
    sys.stdout.write(f"{name:<7} | {text}\n")
    sys.stdout.flush()


def _print_error(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def answers(url: str) -> bool:
    """Returns whether a GET of `url` is answered with 2xx."""
    try:
        with _WITHOUT_PROXY.open(url, timeout=2) as answer:
            status: int = answer.status
            return 200 <= status < 300
    except (OSError, http.client.HTTPException):  # URLError is an OSError.
        return False


def listens(port: int) -> bool:
    """Returns whether a process on loopback accepts connections on `port`."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    """Returns a loopback port on which no process listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
