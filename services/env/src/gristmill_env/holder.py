"""The name by which a process holds permits and claims towards the API."""

from __future__ import annotations

import os
import re
import socket


def holder_name() -> str:
    """Unique among living processes. A container that is started again gets its name, and so its permits, back."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:100]
    return f"{host}-{os.getpid()}"
