"""Reads the lines of the services' logs: the phase of a start, a finished step, a warning, an error."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gristmill.internal import foreign

_TAIL_BYTES = 64 * 1024
"""Read from the end of a log."""
_WARNINGS = 5
EXAMINED: Final = 2000
"""Characters of a line in which patterns search. Some patterns need time that grows with the square of the length."""
_LINE = re.compile(r"^\d\d:\d\d:\d\d (?P<service>\S+) +(?P<level>[A-Z]+) +(?P<text>.*)$")
"""A line of `gristmill.internal.logs`. vLLM's and Redis' own lines have other forms."""
_STEP = re.compile(r"^step (?P<step>\d+)/(?P<steps>\d{1,18})  (?P<text>.*?)(?:  seconds: .*)?$")
_ENDED = "--- ended "
_STARTED = re.compile(r"^--- started (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),")
ANSWERS: Final = "answers"
"""Phase of a server that has started."""
_PHASES: Final = (
    (re.compile(r"\bwarm start step=(\d+)/(\d+)"), "building the model {0}/{1}"),
    (re.compile(r"\bresolved model=(\S+)"), "the model server starts with {0}"),
    (re.compile(r"^Fetching (\d+) files:.*?(\d+)/\d+"), "downloading the model {1}/{0} files"),
    (re.compile(r"Loading safetensors checkpoint shards: .*\| (\d+)/(\d+)"), "loading the weights {0}/{1}"),
    (re.compile(r"GPU KV cache size|CPU KV cache|init engine"), "the model server prepares its cache"),
    (re.compile(r"Application startup complete|Uvicorn running"), ANSWERS),
    (re.compile(r"\bdata set (?:'[^']*'|\S+) .*?: (\d+) rows"), "{0} rows are loaded"),
    (re.compile(r"waiting for the model server"), "waits for the model server"),
    (re.compile(r"is open at version none yet"), "waits for the trainer"),
    (re.compile(r"^waiting for a run"), "waits for a run"),
    (re.compile(r"^model \S+: (\S+) parameters"), "loads a model of {0} parameters"),
    (re.compile(r"^took run \S+: incarnation \d+, step (\d+) of (\d{1,18})\b"), "publishes the weights of step {0}"),
    (re.compile(r"^(\d+) of (\d+) prompts evaluated"), "evaluates {0}/{1} prompts"),
    (re.compile(r"^evaluate run=\S+ version=(\S+)"), "evaluates version {0}"),
    (re.compile(r"^evaluated run=\S+ version=(\S+)"), "generates"),
    (re.compile(r"^resumed from"), "resumed from a checkpoint"),
)
_QUIET: Final = re.compile(r"^refused .*code=(?:run_missing|client_gone)")
"""Warnings that are part of every start and end: the launcher and the services look for a run that does not exist yet,
and a service stops during a request."""


@dataclass(frozen=True)
class Meaning:
    """The meaning of one line. Every field may be empty."""

    phase: str = ""
    step: str = ""
    """The numbers of a finished step, without its times: "step 12/60  reward 0.575 ..."."""
    steps: int | None = None
    """Steps of the run, if the line names them."""
    warning: str = ""
    error: str = ""


def meaning(text: str) -> Meaning:
    """Returns what a line of a service's output means."""
    text = text[:EXAMINED]
    found = _LINE.match(text)
    words = found["text"] if found else text
    if found and found["level"] in ("WARNING", "ERROR", "CRITICAL") and not _QUIET.match(words):
        return Meaning(warning=words) if found["level"] == "WARNING" else Meaning(error=words)
    if (step := _STEP.match(words)) is not None:
        line = f"step {step['step']}/{step['steps']}  {step['text']}"
        return Meaning(step=line, steps=int(step["steps"]), phase=f"step {step['step']}")
    for pattern, phase in _PHASES:
        if (match := pattern.search(words)) is not None:
            steps = int(match[2]) if words.startswith("took run") else None
            return Meaning(phase=phase.format(*match.groups()), steps=steps)
    return Meaning()


@dataclass
class Log:
    """The end of a service's log."""

    path: Path
    phase: str = ""
    error: str = ""
    """The last error, if nothing came after it but its traceback."""
    steps: int | None = None
    started: float | None = None
    """Unix time of the last start."""
    ended: bool = False
    """Whether the launcher wrote that the service has ended."""
    warnings: deque[str] = field(default_factory=lambda: deque(maxlen=_WARNINGS))


def read_log(path: Path, since: float | None = None) -> Log:
    """Reads the end of a log that the local launcher wrote.

    `since`: Unix time of the run's creation. A process that started before the run ends an earlier run's lines.
    """
    log = Log(path)
    with foreign.open_file(path) as file:
        first = file.readline(_TAIL_BYTES).decode(errors="replace")
        size = os.fstat(file.fileno()).st_size
        file.seek(max(size - _TAIL_BYTES, 0))
        lines = file.read(_TAIL_BYTES).decode(errors="replace").splitlines()
    for line in [first, *lines]:
        if (at := _started(line)) is not None:
            if since is not None and at <= since:
                log = Log(path)
            log.started = at
            log.error = ""
        log.ended = at is None and (log.ended or line.startswith(_ENDED))
        event = meaning(line)
        log.phase = event.phase or log.phase
        log.steps = event.steps or log.steps
        if event.warning:
            log.warnings.append(f"{path.stem}: {event.warning}")
        if event.error:
            log.error = event.error
        elif event.phase:
            log.error = ""
    return log


def _started(line: str) -> float | None:
    """Returns the time of a start, or None for another line, such as one that code of a user printed."""
    found = _STARTED.match(line)
    try:
        return None if found is None else time.mktime(time.strptime(found[1], "%Y-%m-%d %H:%M:%S"))
    except (ValueError, OverflowError):
        return None
