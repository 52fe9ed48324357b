#!/usr/bin/env python
"""A whole training on this machine, without Docker: the same as `gristmill run`, with the same flags.

python scripts/launch_local_dataset_run.py --help
"""

from __future__ import annotations

import sys
from pathlib import Path

from gristmill_cli.local.launcher import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path(sys.argv[0]).name))
