"""`python -m gristmill_env`."""

import sys

from gristmill_env.cli import main

if __name__ == "__main__":
    sys.exit(main())
