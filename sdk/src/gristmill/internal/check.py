"""Code that the checks of `gristmill doctor` share: their result, and the memory of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

State = Literal["ok", "warning", "failed"]


class Check(msgspec.Struct, frozen=True):
    """The result of one check."""

    name: str
    state: State
    """ "warning" also means that the check could not be made; `text` then has the reason."""
    text: str
    env: tuple[str, ...] = ()
    """Lines for `.env`."""
    code: str = ""
    """Code of the trouble in gristmill.internal.trouble, if the table has it."""


def read_memory() -> int | None:
    """Returns the bytes of memory that processes here may use: the machine's, or the container's limit."""
    values = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemTotal:"):
                values.append(int(line.split()[1]) * 1024)
        limit = Path("/sys/fs/cgroup/memory.max")
        if limit.exists() and (text := limit.read_text().strip()).isdecimal():
            values.append(int(text))
    except OSError:
        return None
    return min(values, default=None)
