"""`python -m gristmill_sandbox`: serves the sandbox at SANDBOX_HOST (127.0.0.1) and SANDBOX_PORT (9200)."""

from __future__ import annotations

import os
import sys

import uvicorn

from gristmill_sandbox.app import create_app
from gristmill_sandbox.confine import NotConfinedError


def main() -> int:
    """Returns the exit code."""
    try:
        app = create_app()
        port = int(os.environ.get("SANDBOX_PORT") or 9200)
    except (NotConfinedError, ValueError) as error:
        sys.stderr.write(f"sandbox: {error}\n")
        return 2
    host = os.environ.get("SANDBOX_HOST") or "127.0.0.1"
    uvicorn.run(app, host=host, port=port, log_level="warning", access_log=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
