"""`python -m gristmill_cli` is the same program as `gristmill`."""

from __future__ import annotations

import sys

from gristmill_cli.main import main

if __name__ == "__main__":
    sys.exit(main())
