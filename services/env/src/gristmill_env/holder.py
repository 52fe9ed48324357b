"""The name by which a process holds permits and claims towards the API."""

from __future__ import annotations

import os
import re
import socket


def holder_name(pid: int | None = None) -> str:
    """Unique among living processes. A container that is started again gets its name, and so its permits, back.

    `pid`: of a process of this machine; None: this one.
    """
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:100]
    return f"{host}-{os.getpid() if pid is None else pid}"


def has_ended(holder: str) -> bool:
    """Whether `holder` was a process of this machine, and is no more. Of other machines' nothing is known: False."""
    pid = holder.rpartition("-")[2]
    if not pid.isdecimal() or holder != holder_name(int(pid)):
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):  # another user's; no process id
        return False
    return False
