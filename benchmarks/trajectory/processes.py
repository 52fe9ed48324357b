"""Memory and processor time of a process, as the kernel reports them."""

from __future__ import annotations

import os
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def peak_rss(pid: int) -> int:
    """Returns the process' peak resident memory, in bytes."""
    return _status(pid, "VmHWM")


def rss(pid: int) -> int:
    """Returns the process' resident memory, in bytes."""
    return _status(pid, "VmRSS")


def cpu_seconds(*pids: int) -> float:
    """Returns the user and system time of the processes so far, in seconds."""
    used = 0
    for pid in pids:
        # Field 2, the name, is in parentheses and may hold any text. User and system time are fields 14 and 15.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        used += int(fields[11]) + int(fields[12])
    return used / _TICKS


def _status(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"process {pid} tells no {name}: it has ended")
