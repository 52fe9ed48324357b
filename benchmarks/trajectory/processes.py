"""What the kernel knows about a process: memory and processor time."""

from __future__ import annotations

import os
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def peak_rss(pid: int) -> int:
    """The most memory the process ever had resident, bytes."""
    return _status(pid, "VmHWM")


def rss(pid: int) -> int:
    """Bytes resident now."""
    return _status(pid, "VmRSS")


def cpu_seconds(*pids: int) -> float:
    """User and system time the processes have used so far."""
    used = 0
    for pid in pids:
        # The name, field 2, is in parentheses and may hold anything; user and system time are fields 14 and 15.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        used += int(fields[11]) + int(fields[12])
    return used / _TICKS


def _status(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"process {pid} tells no {name}: it has ended")
