"""The log format of all services: time, service, level, event and the event's key=value fields.

Log lines quote text from clients, models and data sets. The formatter writes control characters as escapes, so quoted
text can neither forge a log line nor control the terminal that shows it.
"""

from __future__ import annotations

import logging
import re
import sys
from types import TracebackType
from typing import Final

from gristmill.internal.redaction import redact_text

# C0, DEL and C1, the line and paragraph separators, and the characters that change the direction of text.
CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def setup(service: str, level: int = logging.INFO) -> None:
    """Sends all logging to standard error, one line per event, marked with the service's name."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(f"%(asctime)s {service:<7} %(levelname)-7s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # Log lines contain no file, line or function, and finding them costs more than the rest of a line
    # (https://docs.python.org/3/howto/logging.html#optimization). Thread and process cost little, and W&B's log file
    # contains them.
    logging._srcfile = None
    # One line per request from the HTTP client would bury the lines that matter.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("httpcore").setLevel(logging.WARNING)


def line(event: str, **fields: object) -> str:
    """Formats an event: `line("submit", run="a", tokens=31, seconds=0.4213)` is "submit run=a tokens=31 seconds=0.421".

    A value with spaces or unprintable characters is written as a Python literal.
    """
    return " ".join([escaped(event), *(f"{escaped(key)}={_text(value)}" for key, value in fields.items())])


def escaped(text: str) -> str:
    r"""Returns `text` with every control character as an escape: a newline is `\n`, an escape character `\x1b`."""
    return text if text.isprintable() else CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


class LineFormatter(logging.Formatter):
    """Writes the time once per second instead of once per line, escapes control characters and masks secrets.

    `extra={"trace": TEXT}` of a record is the traceback of an error in another process. It keeps its lines.
    """

    _second, _written = -1, ""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        trace = getattr(record, "trace", "")
        return redact_text(f"{text}\n{_indented(trace.rstrip())}" if trace else text)

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        if int(record.created) != self._second:
            self._second, self._written = int(record.created), super().formatTime(record, datefmt)
        return self._written

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return escaped(super().formatMessage(record))

    def formatException(self, ei: _ExcInfo) -> str:  # noqa: N802
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        return _indented(super().formatStack(stack_info))


_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def _indented(lines: str) -> str:
    """Indents and escapes a traceback, because no line of an error's message may look like a log line."""
    return "\n".join(f"  {escaped(text)}" for text in lines.split("\n"))


def _text(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return repr(text) if " " in text or not text.isprintable() else text
