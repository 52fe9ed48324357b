"""Confines the calling process for good: `confine`.

`confine` uses three mechanisms of Linux. None of them needs a privilege or a namespace, so they work in an ordinary
container and on an ordinary host.

- Landlock (kernel 5.13) allows reading Python's own files, and reading and writing one folder. No other file can be
  opened, created, renamed or removed.
- seccomp refuses the system calls that create a process, execute a file, open a socket, send a signal to another
  process, read another process's memory, change the metadata of a file, or create an object that outlives the process.
- Resource limits bound memory, processor time, file size and open files.

They stop a program. They do not stop an attack on a fault of the kernel: docs/security.md says what to add against it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from errno import ENOSYS, EPERM
from pathlib import Path
from typing import Final

_LIBC: Final = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Limits:
    """What one process may use."""

    seconds: float
    """Of wall clock; the keeper ends the process then (cell.py). The processor time is limited to the next whole
    second."""
    memory_bytes: int
    """Of address space."""
    output_bytes: int
    """Of stdout and of stderr, and of each file that the process writes."""


class NotConfinedError(Exception):
    """The kernel lacks Landlock or seccomp, so no program may run."""


def confine(folder: Path, limits: Limits, *, landlock: bool = True) -> None:
    """Leaves the process only what the module's text names. `folder`: the one that it may write.
    `landlock`: False on a kernel without it, where every file of the container stays readable.

    Raises NotConfinedError. The process must have one thread, because Landlock and seccomp bind the calling thread.
    """
    _limit(limits)
    _drop_capabilities()
    if _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise NotConfinedError(f"prctl(PR_SET_NO_NEW_PRIVS): {_error()}")
    if landlock:
        _restrict_files(folder)
    _restrict_calls()


def check(*, landlock: bool = True) -> None:
    """Raises NotConfinedError if this kernel cannot confine a process."""
    if landlock:
        _landlock_version()
    _architecture()


# --- Resource limits and capabilities ---------------------------------------------------------------------------------

_OPEN_FILES: Final = 64
_PR_SET_NO_NEW_PRIVS: Final = 38
_CAPABILITY_VERSION: Final = 0x20080522


def _limit(limits: Limits) -> None:
    seconds = int(limits.seconds) + 1
    for kind, value in (
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, limits.output_bytes),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        _, hard = resource.getrlimit(kind)
        least = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (least, least))


def end_with(parent: int) -> None:
    """Makes the kernel end this process when its parent ends. Raises NotConfinedError if the parent has ended."""
    if _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) or os.getppid() != parent:
        raise NotConfinedError("the program's keeper has ended")


def _drop_capabilities() -> None:
    """Matters for root only, whom the other two mechanisms confine too."""
    header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    if _LIBC.capset(header, bytes(24)):
        raise NotConfinedError(f"capset: {_error()}")


# --- Landlock: linux/landlock.h ---------------------------------------------------------------------------------------

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_PATH_BENEATH: Final = 1
_READ: Final = 1 << 2 | 1 << 3  # files and folders
_ACCESS: Final = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
"""All kinds of access that a version of Landlock can refuse."""
_ALL_ACCESS: Final = (1 << 16) - 1
"""Since version 5."""
_SPECIAL: Final = 1 << 0 | 1 << 6 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 12 | 1 << 15
"""Execution, devices, sockets, pipes, symbolic links and ioctl: not in the program's own folder either."""
_SYSTEM: Final = ("/usr/lib", "/lib", "/lib64", "/usr/share/zoneinfo", "/etc/localtime")
_DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/urandom")


def _landlock_version() -> int:
    version = _LIBC.syscall(_CREATE_RULESET, None, 0, 1)
    if version < 1:
        raise NotConfinedError(
            f"this kernel ({platform.release()}) has no Landlock: {_error()}. Run the sandbox on Linux 5.13 or later, "
            "with Landlock among the security modules (the kernel's option lsm=), where no seccomp profile refuses it"
        )
    return int(version)


def _restrict_files(folder: Path) -> None:
    version = _landlock_version()
    handled = _ACCESS.get(version, _ALL_ACCESS)
    # Since version 6 also: no abstract socket and no signal of another process.
    attributes = struct.pack("Q", handled) if version < 6 else struct.pack("QQQ", handled, 0, 3)
    ruleset = _LIBC.syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    if ruleset < 0:
        raise NotConfinedError(f"landlock_create_ruleset: {_error()}")
    python = {os.path.realpath(path) for path in (sys.base_prefix, sys.prefix)}
    for path in (*_SYSTEM, *sorted(python - {"/", "/usr"})):
        _allow(ruleset, path, _READ & handled)
    for path in _DEVICES:
        _allow(ruleset, path, (1 << 1 | 1 << 2) & handled)
    _allow(ruleset, str(folder), handled & ~_SPECIAL)
    if _LIBC.syscall(_RESTRICT_SELF, ruleset, 0):
        raise NotConfinedError(f"landlock_restrict_self: {_error()}")
    os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    try:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    if not Path(path).is_dir():
        access &= ~(1 << 3)
    rule = struct.pack("=Qi", access, parent)
    if _LIBC.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0):
        raise NotConfinedError(f"landlock_add_rule for {path}: {_error()}")
    os.close(parent)


# --- seccomp: linux/seccomp.h, linux/filter.h -------------------------------------------------------------------------

_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_LOAD, _AND, _EQUAL, _GREATER, _RETURN = 0x20, 0x54, 0x15, 0x25, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_CLONE_IN_PROCESS: Final = 0x00010000 | 0x400 | 0x200
"""CLONE_THREAD, CLONE_FILES, CLONE_FS: a thread with its own table of files could open more than `_OPEN_FILES`."""
_PR_SET_PDEATHSIG: Final = 1
_SIGNALLING_FCNTL: Final = (8, 10, 15, 1024, 1026)
"""F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY."""
_HARMLESS_IOCTL: Final = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""
_NEWEST: Final = 450
"""Later system calls do not exist for the program. libc uses older ones then."""


@dataclass(frozen=True)
class _Architecture:
    """Numbers of system calls: <asm/unistd.h>."""

    audit: int
    refused: frozenset[int]
    """System calls that are refused besides _REFUSED."""
    clone: int
    own_process: tuple[int, ...]
    """kill and tgkill: allowed with the process's own id."""
    prlimit: int
    prctl: int
    fcntl: int
    ioctl: int
    socketpair: int
    opens: tuple[tuple[int, int], ...]
    """Number, and place of the argument with the flags."""


_REFUSED: Final = frozenset(
    {
        *(424, 434, 438),  # pidfd_send_signal, pidfd_open, pidfd_getfd
        *(425, 426, 427),  # io_uring
        *(428, 429, 430, 431, 432, 433, 442),  # open_tree, move_mount, fsopen, fsconfig, fsmount, fspick, mount_setattr
        *(440, 448),  # process_madvise, process_mrelease
    }
)
_ABSENT: Final = (435, 437)
"""clone3 and openat2, whose arguments a filter cannot read. libc uses clone and openat then."""
_ARCHITECTURES: Final = {
    "x86_64": _Architecture(
        audit=0xC000003E,
        refused=frozenset(
            {
                *(57, 58, 59, 322),  # fork, vfork, execve, execveat
                *(41, 42, 49),  # socket, connect, bind
                *(101, 310, 311, 312),  # ptrace, process_vm_readv, process_vm_writev, kcmp
                *(254, 300, 303, 304, 103),  # inotify_add_watch, fanotify_init, file handles, syslog
                *(200, 129, 297),  # tkill, rt_sigqueueinfo, rt_tgsigqueueinfo
                *(272, 308, 165, 166, 155, 161),  # unshare, setns, mount, umount2, pivot_root, chroot
                *(321, 298, 248, 249, 250, 323),  # bpf, perf_event_open, keys, userfaultfd
                *(29, 30, 31, 64, 65, 66, 220, 68, 69, 70, 71, 240, 241),  # System V's and POSIX' shared objects
                *(76, 90, 91, 268, 92, 93, 94, 260),  # truncate, chmod, chown
                *(188, 189, 190, 197, 198, 199, 132, 235, 261, 280),  # extended attributes, times of files
                *(141, 142, 144, 203, 314, 251, 256, 279),  # another process's priority, processors, memory
                *(285, 319),  # fallocate and memfd_create, whose bytes no limit counts
            }
        ),
        clone=56,
        own_process=(62, 234),
        prlimit=302,
        prctl=157,
        fcntl=72,
        ioctl=16,
        socketpair=53,
        opens=((2, 1), (257, 2)),
    ),
    "aarch64": _Architecture(
        audit=0xC00000B7,
        refused=frozenset(
            {
                *(221, 281),
                *(198, 203, 200),
                *(117, 270, 271, 272),
                *(27, 262, 264, 265, 116),
                *(130, 138, 240),
                *(97, 268, 40, 39, 41, 51),
                *(280, 241, 217, 218, 219, 282),
                *(194, 195, 196, 190, 191, 192, 193, 186, 187, 188, 189, 180, 181),
                *(45, 52, 53, 54, 55),
                *(5, 6, 7, 14, 15, 16, 88),
                *(140, 118, 119, 122, 274, 30, 238, 239),
                *(47, 279),
            }
        ),
        clone=220,
        own_process=(129, 131),
        prlimit=261,
        prctl=167,
        fcntl=25,
        ioctl=29,
        socketpair=199,
        opens=((56, 2),),
    ),
}


def _architecture() -> _Architecture:
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise NotConfinedError(
            f"the sandbox knows the system calls of {', '.join(_ARCHITECTURES)}; this machine is {machine}"
        )
    return _ARCHITECTURES[machine]


def _restrict_calls() -> None:
    code = b"".join(_filter(_architecture()))
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
    if _LIBC.prctl(_PR_SET_SECCOMP, _MODE_FILTER, program, 0, 0):
        raise NotConfinedError(f"prctl(PR_SET_SECCOMP): {_error()}")


def _filter(machine: _Architecture) -> Iterable[bytes]:
    """Yields the instructions. After each test the number of the call is in the accumulator, or the filter has
    ended."""
    refuse = _instruction(_RETURN, _ERRNO | EPERM)
    absent = _instruction(_RETURN, _ERRNO | ENOSYS)
    allow = _instruction(_RETURN, _ALLOW)
    yield _instruction(_LOAD, 4)  # the architecture
    yield _instruction(_EQUAL, machine.audit, 1, 0)
    yield _instruction(_RETURN, _KILL)
    yield _instruction(_LOAD, 0)  # the number of the call; x32's are above _NEWEST
    yield from (_instruction(_GREATER, _NEWEST, 0, 1), absent)
    for number in _ABSENT:
        yield from (_instruction(_EQUAL, number, 0, 1), absent)
    for number in sorted(_REFUSED | machine.refused):
        yield from (_instruction(_EQUAL, number, 0, 1), refuse)
    own = [(number, os.getpid()) for number in machine.own_process] + [(machine.prlimit, 0)]
    for number, value in own:
        yield _instruction(_EQUAL, number, 0, 4)
        yield from (_argument(0), _instruction(_EQUAL, value, 0, 1), allow, refuse)
    # A new thread, but no new process.
    yield _instruction(_EQUAL, machine.clone, 0, 5)
    yield from (_argument(0), _instruction(_AND, _CLONE_IN_PROCESS))
    yield from (_instruction(_EQUAL, _CLONE_IN_PROCESS, 0, 1), allow, refuse)
    # The program ends with its keeper.
    yield _instruction(_EQUAL, machine.prctl, 0, 4)
    yield from (_argument(0), _instruction(_EQUAL, _PR_SET_PDEATHSIG, 0, 1), refuse, allow)
    # Stream pairs only: a datagram socket reaches every local address.
    yield _instruction(_EQUAL, machine.socketpair, 0, 5)
    yield from (_argument(1), _instruction(_AND, 0xF), _instruction(_EQUAL, 1, 0, 1), allow, refuse)
    # The kernel would send a signal for the program.
    yield from _by_argument(machine.fcntl, _SIGNALLING_FCNTL, refuse, allow)
    yield from _by_argument(machine.ioctl, _HARMLESS_IOCTL, allow, refuse)
    # Landlock before version 3 lets a file be truncated that is opened for reading, or for neither reading nor writing.
    for number, place in machine.opens:
        yield _instruction(_EQUAL, number, 0, 7)
        yield from (_argument(place), _instruction(_AND, os.O_TRUNC | os.O_ACCMODE))
        yield from (_instruction(_EQUAL, os.O_TRUNC, 2, 0), _instruction(_AND, os.O_ACCMODE))
        yield from (_instruction(_EQUAL, os.O_ACCMODE, 0, 1), refuse, allow)
    yield allow


def _by_argument(number: int, values: tuple[int, ...], listed: bytes, others: bytes) -> Iterable[bytes]:
    """Yields the instructions for a call whose second argument decides."""
    yield _instruction(_EQUAL, number, 0, 2 * len(values) + 2)
    yield _argument(1)
    for value in values:
        yield from (_instruction(_EQUAL, value, 0, 1), listed)
    yield others


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _argument(place: int) -> bytes:
    """Loads the lower 32 bits of an argument."""
    return _instruction(_LOAD, 16 + 8 * place)


def _error() -> str:
    return os.strerror(ctypes.get_errno())
