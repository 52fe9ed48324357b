"""`gristmill`, or `python -m gristmill`: the commands of `gristmill.view.cli`."""

from __future__ import annotations

import sys


def main() -> int:
    """Runs a command. Returns the exit code; 1 also if the extra `cli` of the SDK is not installed."""
    try:
        from gristmill.view.cli import main as run
    except ModuleNotFoundError as error:
        if error.name != "rich":
            raise
        sys.stderr.write("error [extra_missing]: the commands need rich: pip install './sdk[cli]'\n")
        return 1
    return run()


if __name__ == "__main__":
    sys.exit(main())
