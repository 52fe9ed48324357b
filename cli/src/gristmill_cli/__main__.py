"""The entry of the program: `gristmill`, or `python -m gristmill_cli`."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Runs the command line. Ctrl-C while the packages load ends the program without a traceback."""
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from gristmill_cli import main as command_line

    signal.signal(signal.SIGINT, interrupt)
    return command_line.main()


if __name__ == "__main__":
    sys.exit(main())
