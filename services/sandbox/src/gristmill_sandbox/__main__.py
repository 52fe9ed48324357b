"""`python -m gristmill_sandbox`: serves the sandbox at SANDBOX_HOST (127.0.0.1) and SANDBOX_PORT (9200).

With `--child` it takes a free port of 127.0.0.1, prints its address, and ends when its stdin ends.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys

import uvicorn

from gristmill_sandbox.app import create_app
from gristmill_sandbox.confine import NotConfinedError


def main() -> int:
    """Returns the exit code."""
    child = sys.argv[1:] == ["--child"]
    try:
        app = create_app()
        host = "127.0.0.1" if child else os.environ.get("SANDBOX_HOST") or "127.0.0.1"
        listening = socket.create_server((host, 0 if child else int(os.environ.get("SANDBOX_PORT") or 9200)))
    except (NotConfinedError, OSError, ValueError) as error:
        sys.stderr.write(f"sandbox: {error}\n")
        return 2
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
    asyncio.run(_serve(server, listening, child))
    return 0


async def _serve(server: uvicorn.Server, listening: socket.socket, child: bool) -> None:
    if child:
        host, port = listening.getsockname()
        sys.stdout.write(f"http://{host}:{port}\n")
        sys.stdout.flush()
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), lambda: setattr(server, "should_exit", True))
    await server.serve(sockets=[listening])


if __name__ == "__main__":
    sys.exit(main())
