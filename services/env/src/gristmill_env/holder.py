"""The name by which a process holds permits and claims at the API."""

from __future__ import annotations

import os
import re
import socket


def holder_name() -> str:
    """Returns a name that is unique among running processes. A restarted container keeps its name and its permits."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:100]
    return f"{host}-{os.getpid()}"
