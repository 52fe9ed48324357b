"""`python -m gristmill_env.local_server --config gsm8k`: the same as `try`, under Atropos' name for it."""

from __future__ import annotations

import os
import sys

from gristmill_env.cli import run_command

if __name__ == "__main__":
    sys.exit(run_command(["try", *sys.argv[1:]], dict(os.environ)))
