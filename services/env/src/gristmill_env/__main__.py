"""`python -m gristmill_env`."""

import sys

from gristmill_env.cli import main

sys.exit(main())
