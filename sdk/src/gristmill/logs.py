"""One log format for all services: time, service, level, event and its key=value fields."""

from __future__ import annotations

import logging
import sys


def setup(service: str, level: int = logging.INFO) -> None:
    """Send all logging to standard error, one line an event, marked with the service's name."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_ByTheSecond(f"%(asctime)s {service:<7} %(levelname)-7s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # What no line of ours tells need not be found out: https://docs.python.org/3/howto/logging.html#optimization
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # file, line and function of the caller
    # One line a request from the HTTP client would bury the lines that tell what happened.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("httpcore").setLevel(logging.WARNING)


class _ByTheSecond(logging.Formatter):
    """Writes the time out once a second, not once a line."""

    _second, _written = -1, ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        if int(record.created) != self._second:
            self._second, self._written = int(record.created), super().formatTime(record, datefmt)
        return self._written


def line(event: str, **fields: object) -> str:
    """`line("submit", run="a", tokens=31, seconds=0.4213)` is "submit run=a tokens=31 seconds=0.421"."""
    return " ".join([event, *(f"{key}={_text(value)}" for key, value in fields.items())])


def _text(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return repr(text) if " " in text or "\n" in text else text
