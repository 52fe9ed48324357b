"""The processes of the sandbox: a stem process, and for each program a keeper and the program's own process.

    service ── stem ──┬── keeper ── program
                      └── keeper ── program

The stem process starts with an empty environment, imports what programs often import, and forks for each program a
keeper, which forks the process that becomes the program. Both are forked before any part of the job exists in them,
so that a program finds in its memory nothing of another one. A fork takes about a millisecond; Python's start would
take twenty.

The keeper passes the job on, writes stdin, and reads stdout and stderr. It ends the program at its limit of time or
output, or when the service gives it up, and reports how it ended. It is not confined, and parses nothing that the
program writes.

Messages are a length of four bytes and the bytes. The service sends two: the `Feed` for the keeper, and the `Job` for
the program's process. The keeper answers with the `Report`.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

from gristmill_sandbox.confine import Limits, NotConfinedError, confine, end_with

_LENGTH: Final = struct.Struct("!I")
_CHUNK: Final = 65536
_IMPORTED: Final = (
    *(
        "bisect",
        "collections",
        "copy",
        "dataclasses",
        "datetime",
        "decimal",
        "fractions",
        "functools",
        "heapq",
        "inspect",
    ),
    *("io", "itertools", "json", "linecache", "math", "operator", "pickle", "random", "re", "statistics", "string"),
    *("textwrap", "threading", "traceback", "typing", "gristmill_sandbox.program"),
)
_START: Final = (
    "import sys; sys.path.append(sys.argv[1]); from gristmill_sandbox.cell import stem; stem(int(sys.argv[2]))"
)


@dataclass(frozen=True)
class Feed:
    """The part of a job that the keeper reads."""

    stdin: str
    seconds: float
    output_bytes: int


@dataclass(frozen=True)
class Job:
    """The part of a job that the program's process reads. `role` "run" runs a program. "serve" runs a program and then
    answers calls of its functions. "test" runs tests, which call the functions of another process (program.py)."""

    role: Literal["run", "serve", "test"]
    program: str
    limits: Limits
    files: dict[str, str] = field(default_factory=dict)
    """Text by relative path, in the folder in which the program runs."""
    landlock: bool = True


@dataclass(frozen=True)
class Report:
    """How a program ended."""

    status: Literal["exited", "signalled", "timed_out", "output_limit", "disk_limit", "thread_limit", "failed"]
    """The sandbox ended the program at a limit; or "failed": the sandbox itself failed, and `stderr` says how."""
    code: int | None
    """Exit code, or number of the signal."""
    stdout: str
    stderr: str
    seconds: float
    """Of wall clock, from the job's arrival."""
    cpu_seconds: float
    memory_bytes: int
    """Largest resident memory."""


def start_stem() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts the stem process. `fork_cell` sends it orders through the socket; it ends when the socket is closed."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _START, str(Path(__file__).parents[1]), str(its.fileno())],
            env={"LANG": "C.UTF-8", "TMPDIR": tempfile.gettempdir()},
            pass_fds=[its.fileno()],
            stdin=subprocess.DEVNULL,
        )
    return process, ours


def fork_cell(stem: socket.socket, peer: socket.socket | None = None) -> socket.socket:
    """Makes the stem fork a keeper with its program, and returns the connection to the keeper. The caller sends the
    messages `encode(feed)` and `encode(job)`, and reads the report. `peer`: the program's connection to another
    program."""
    ours, its = socket.socketpair()
    with its:
        socket.send_fds(stem, [b"."], [its.fileno(), *([] if peer is None else [peer.fileno()])])
    return ours


def encode(message: Feed | Job | Report) -> bytes:
    body = json.dumps(asdict(message)).encode("utf-8", "surrogatepass")
    return _LENGTH.pack(len(body)) + body


# --- The stem ---------------------------------------------------------------------------------------------------------


def stem(descriptor: int) -> None:
    """Forks keepers until the service closes the socket of this descriptor."""
    control = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the service, and this process with it.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The kernel reaps the keepers.
    for name in _IMPORTED:
        __import__(name)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 2)
        if not message:
            return
        try:
            child = os.fork()
        except OSError as error:  # Too many processes. The service asks again.
            sys.stderr.write(f"sandbox: no process for a program: {error}\n")
            child = -1
        if child == 0:
            control.close()
            code = 1
            try:
                _keep(socket.socket(fileno=descriptors[0]), descriptors[1] if len(descriptors) > 1 else None)
                code = 0
            except BrokenPipeError:
                code = 0  # The service gave the program up.
            finally:
                os._exit(code)
        for descriptor in descriptors:
            os.close(descriptor)


# --- The keeper -------------------------------------------------------------------------------------------------------


def _keep(service: socket.socket, peer: int | None) -> None:
    # A descriptor that can be read when the program has ended. gVisor has no pidfd, which would be one too.
    ended, noted = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(noted)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=os.environ["TMPDIR"])).resolve()
    try:
        its, ours = socket.socketpair()
        pipes = [*(os.pipe() for _ in range(3)), (its.detach(), ours.detach())]
        keeper, program = os.getpid(), os.fork()
        if program == 0:
            _become_program(keeper, folder, pipes, peer)
        if peer is not None:
            os.close(peer)
        for position, (reading, writing) in enumerate(pipes):
            os.close(writing if position in (1, 2) else reading)
        try:
            feed, job = Feed(**json.loads(_receive(service))), _receive(service)
            ends = [pipes[0][1], pipes[1][0], pipes[2][0], pipes[3][1]]
            report = _watch(service, program, ended, feed, job, ends, folder)
        except BrokenPipeError:
            raise
        except Exception as error:  # noqa: BLE001  a program must not look like a sandbox that is away
            text = f"the sandbox failed: {type(error).__name__}: {error}"
            sys.stderr.write(f"{text}\n")
            report = Report("failed", None, "", text, 0.0, 0.0, 0)
        finally:
            _kill(program)
            with contextlib.suppress(ChildProcessError):  # `_watch` has waited for it.
                os.waitpid(program, 0)  # Until then it may write into its folder.
    finally:
        try:
            _remove(folder)
        except OSError as error:
            sys.stderr.write(f"sandbox: the files of a program remain in {folder.parent}: {error}\n")
    service.setblocking(True)
    service.sendall(encode(report))


def _watch(
    service: socket.socket, program: int, ended: int, feed: Feed, job: bytes, ends: list[int], folder: Path
) -> Report:
    """Returns how the program ended. `program`: the id of its process, which stays its own until this process waits for
    it. `ended`: can be read when the process may have ended. `ends`: of stdin, stdout, stderr and the job's socket, in
    which the process says that the program begins."""
    stdin, stdout, stderr, job_socket = ends
    began = time.monotonic()
    pending = {job_socket: _LENGTH.pack(len(job)) + job, stdin: feed.stdin.encode("utf-8", "surrogatepass")}
    output = {stdout: bytearray(), stderr: bytearray()}
    poll = select.poll()
    for descriptor in (*pending, *output, ended, service.fileno()):
        os.set_blocking(descriptor, False)
        poll.register(descriptor, select.POLLOUT if descriptor in pending else select.POLLIN)
    opened = set(output)
    status: Any = "exited"
    alive = True
    while alive:
        seconds_left = began + feed.seconds - time.monotonic()
        reached = "timed_out" if seconds_left <= 0 else _limit_reached(program, folder, feed.output_bytes)
        if any(len(data) > feed.output_bytes for data in output.values()):
            reached = "output_limit"
        if reached is not None and status == "exited":
            status = reached
            _kill(program)
        for descriptor, _ in poll.poll(1000 * min(max(seconds_left, 0.01), _LOOK_EVERY)):
            if descriptor == ended:
                os.read(ended, _CHUNK)
                alive = os.waitid(os.P_PID, program, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None
            elif descriptor == service.fileno():  # The service has closed it.
                raise BrokenPipeError
            elif descriptor in pending:
                pending[descriptor] = _write(descriptor, pending[descriptor])
                if not pending[descriptor]:
                    poll.unregister(descriptor)
                    if descriptor == stdin:
                        os.close(stdin)
            elif descriptor in opened and _read(descriptor, output[descriptor]) == 0:
                opened.remove(descriptor)
                poll.unregister(descriptor)
    for descriptor in opened:  # The pipes have the program's output. Their ends may be in a message without a receiver.
        while len(output[descriptor]) <= feed.output_bytes and _read(descriptor, output[descriptor]):
            pass
    if status == "exited" and any(len(data) > feed.output_bytes for data in output.values()):
        status = "output_limit"
    _, wait, used = os.wait4(program, 0)
    code = os.waitstatus_to_exitcode(wait)
    if status == "exited" and code < 0:
        status = "signalled"
    if status in ("exited", "signalled") and not _read(job_socket, bytearray()):  # It ended before it began.
        status = "failed"
    return Report(
        status=status,
        code=abs(code) if status in ("exited", "signalled") else None,
        stdout=output[stdout][: feed.output_bytes].decode("utf-8", "replace"),
        stderr=output[stderr][: feed.output_bytes].decode("utf-8", "replace"),
        seconds=time.monotonic() - began,
        cpu_seconds=used.ru_utime + used.ru_stime,
        memory_bytes=used.ru_maxrss * 1024,
    )


_LOOK_EVERY: Final = 0.1
"""Seconds between two looks at a program's threads and files, which no limit of the kernel bounds."""
_MOST_THREADS: Final = 64
_MOST_FILES: Final = 1000
_MOST_BYTES: Final = 64 * 2**20


def _limit_reached(program: int, folder: Path, largest: int) -> str | None:
    """Returns "disk_limit" or "thread_limit" if the program has reached it. `largest`: bytes that a file may have."""
    threads = files = size = 0
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # The process has ended.
        try:
            tasks = list(Path(f"/proc/{program}/task").iterdir())
            threads = len(tasks)
            # A file without a name exists as long as a page of it is mapped.
            deleted = rb"^\S+ \S+ \S+ (\S+ \d+) +%b/.* \(deleted\)$" % re.escape(bytes(folder))
            files = len(set(re.findall(deleted, _maps(tasks), re.MULTILINE)))
        except PermissionError:  # The program hides from its keeper.
            files = _MOST_FILES + 1
        size = files * largest
    waiting = [str(folder)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    files += 1
                    found = entry.stat(follow_symlinks=False)
                    size += max(found.st_size, 512 * found.st_blocks)
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except OSError as error:  # It may be gone already. The program may also hide it, or make it too deep to list.
            files += 0 if error.errno == errno.ENOENT else _MOST_FILES + 1
        if files > _MOST_FILES or size > _MOST_BYTES:
            return "disk_limit"
    return "thread_limit" if threads > _MOST_THREADS else None


def _maps(tasks: Iterable[Path]) -> bytes:
    """Returns the mappings of a process, from a thread that lives: the first one may have ended before the others."""
    for task in tasks:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if mapped := (task / "maps").read_bytes():
                return mapped
    return b""


def _remove(folder: Path) -> None:
    """Removes a folder of a program that has ended, however deep it is and whatever modes it has.

    Each item moves to a second folder, and then the items in it, so that no path becomes long.
    """
    heap = Path(tempfile.mkdtemp(prefix="removed-", dir=os.environ["TMPDIR"]))
    number, waiting = itertools.count(), [folder]
    while waiting:
        path = waiting.pop()
        if path.is_symlink() or not path.is_dir():
            path.unlink()
            continue
        for inside in list(path.iterdir()):
            if inside.is_dir() and not inside.is_symlink():
                inside.chmod(0o700)
            waiting.append(inside.rename(heap / str(next(number))))
        path.rmdir()
    heap.rmdir()


def _kill(program: int) -> None:
    with contextlib.suppress(ChildProcessError):  # This process has waited for it, so the id may be another process'.
        os.waitid(os.P_PID, program, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        os.kill(program, signal.SIGKILL)


def _read(descriptor: int, data: bytearray) -> int | None:
    """Adds what is in a pipe. Returns the number of bytes: 0 at its end, None if it is empty."""
    try:
        part = os.read(descriptor, _CHUNK)
    except BlockingIOError:  # The program can read its own pipe too.
        return None
    except ConnectionResetError:  # The process has ended before it read its job.
        return 0
    data += part
    return len(part)


def _write(descriptor: int, data: bytes) -> bytes:
    """Returns what is left to be written: nothing if the program has closed its end."""
    try:
        return data[os.write(descriptor, data[:_CHUNK]) :]
    except BlockingIOError:
        return data
    except ConnectionError:
        return b""


def _receive(service: socket.socket) -> bytes:
    """Raises BrokenPipeError if the service has closed the connection."""
    (length,) = _LENGTH.unpack(_exactly(service, _LENGTH.size))
    return _exactly(service, length)


def _exactly(service: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = service.recv(min(length - len(data), _CHUNK))
        if not part:
            raise BrokenPipeError
        data += part
    return bytes(data)


# --- The program's process --------------------------------------------------------------------------------------------


def _become_program(keeper: int, folder: Path, pipes: list[tuple[int, int]], peer: int | None) -> NoReturn:
    from gristmill_sandbox import program

    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        end_with(keeper)
        ends = [pipes[0][0], pipes[1][1], pipes[2][1], pipes[3][0], *([] if peer is None else [peer])]
        # First above the targets, so that no target is still needed.
        high = [os.dup2(end, 64 + place) for place, end in enumerate(ends)]
        for place, descriptor in enumerate(high):
            os.dup2(descriptor, place)
        os.closerange(len(ends), 1 << 16)
        service = socket.socket(fileno=3)
        given = json.loads(_receive(service))
        job = Job(**(given | {"limits": Limits(**given["limits"])}))
        os.chdir(folder)
        for name, text in job.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8", "surrogatepass")
        confine(folder, job.limits, landlock=job.landlock)
        service.send(b".")
        service.close()  # Nothing that the program does later can say that it did not begin.
        code = program.run(job.role, job.program, None if peer is None else 4)
    except NotConfinedError as error:
        os.write(2, f"{error}\n".encode())
    except BaseException as error:  # noqa: BLE001  the process is a fork, which must not return into its parent's code
        os.write(2, f"the sandbox could not begin the program: {type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)
