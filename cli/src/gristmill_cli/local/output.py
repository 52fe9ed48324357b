"""The output of `gristmill run` while it trains, and at the end.

On a terminal it is one live view. Without a terminal it is one line per step and the warnings, and with --verbose the
merged output of all services. The services' full output is in runs/<run>/logs/ in any case.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter, deque
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.text import Text

from gristmill.internal.logs import escaped
from gristmill_cli.local.local_run import LocalRun
from gristmill_cli.local.processes import print_line
from gristmill_cli.terminal import LiveView, Screen, redraws
from gristmill_view.overview import current_rows, overview
from gristmill_view.phases import ANSWERS, meaning
from gristmill_view.samples import Sample

_SAMPLE_EVERY = 2.0
"""Seconds."""
_REPEATS = 3
"""How often the same warning is shown."""
_DIGITS = re.compile(r"\d+")


class Output:
    """Receives everything that the launcher and its services say.

    This class is the output of --verbose: every line of every service, after the service's name.
    """

    def line(self, service: str, text: str) -> None:
        """Receives a line of a service's output. Reader threads call it."""
        print_line(service, text)

    def say(self, text: str) -> None:
        """Shows a message of the launcher."""
        print(text, flush=True)

    def stopping(self, text: str = "") -> None:
        """Shows that the services stop. `text`: the work that they still finish."""
        if text:
            self.say(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass


class Warnings:
    """Decides which warnings are shown: each of them a few times, however its numbers change."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()
        self._lock = threading.Lock()

    def show(self, service: str, text: str) -> str | None:
        """Returns the line to show, or None."""
        with self._lock:
            self._seen[key := f"{service} {_DIGITS.sub('N', text)}"] += 1
            count = self._seen[key]
        more = "" if count < _REPEATS else " (further lines like this one are only in the log)"
        return None if count > _REPEATS else f"{service}: {text}{more}"


class StepLines(Output):
    """Without a terminal: the phases of the start, one line per step, and warnings."""

    def __init__(self) -> None:
        self._warnings = Warnings()
        self._phases: dict[str, str] = {}

    def line(self, service: str, text: str) -> None:
        event = meaning(text)
        if event.step:
            self.say(event.step)
        elif problem := event.warning or event.error:
            if (shown := self._warnings.show(service, problem)) is not None:
                self.say(shown)
        # A server that answers loads weights again at every publication, so this phase is not shown again.
        elif event.phase and self._phases.get(service) not in (ANSWERS, kind := _DIGITS.sub("N", event.phase)):
            self._phases[service] = kind
            self.say(f"{service}: {event.phase}")

    def say(self, text: str) -> None:
        print(escaped(text), flush=True)


class LiveOutput(Output):
    """On a terminal: the live view of the run."""

    def __init__(self, run: LocalRun, console: Console, footer: str) -> None:
        self._run = run
        self._console = console
        self._footer = footer
        self._warnings = Warnings()
        self._notes: deque[str] = deque(maxlen=3)
        self._sample: Sample | None = None
        self._sampled = 0.0
        self._view = LiveView(console, self.screen)

    def line(self, service: str, text: str) -> None:
        event = meaning(text)
        self._run.heard(service, event)
        problem = event.warning or event.error
        if problem and (shown := self._warnings.show(service, problem)) is not None:
            self._notes.append(shown)

    def say(self, text: str) -> None:
        self._console.print(Text(escaped(text)), soft_wrap=True)

    def stopping(self, text: str = "") -> None:
        self._run.close()
        super().stopping(text)
        self._view.redraw()

    def screen(self) -> Screen:
        """Returns what the view shows now."""
        facts = self._run.facts()
        if time.monotonic() - self._sampled > _SAMPLE_EVERY and facts.status is not None and facts.status.accepted:
            self._sampled = time.monotonic()
            self._sample = next(iter(self._run.samples(1)), self._sample)
        return Screen(overview(facts), current_rows(facts), self._sample, tuple(self._notes), self._footer)

    def __enter__(self) -> Self:
        self._view.refresh()
        self._view.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._view.__exit__(kind, error, at)


def choose(run: LocalRun, logs: Path, *, verbose: bool) -> Output:
    """Returns the output that fits the options and the terminal. `logs`: the folder that the view's footer names."""
    if verbose:
        return Output()
    console = Console()
    if not redraws(console):
        return StepLines()
    return LiveOutput(run, console, f"logs: {logs}   Ctrl-C stops; the same command continues")
