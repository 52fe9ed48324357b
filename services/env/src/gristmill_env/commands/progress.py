"""Progress of a long command, on standard error: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from gristmill_env.pace import duration

_EVERY = 10.0
"""Seconds between plain lines."""


class Steps:
    """Counts finished items out of `total`, and shows rates and the remaining time."""

    def __init__(
        self,
        what: str,
        total: int | None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`what`: the counted items, in the plural. `total`: None if unknown. `console`: standard error if None.
        `clock`: seconds."""
        self._clock = clock
        self._what = what
        self._total = total
        self._console = console or Console(file=sys.stderr)
        self._started = self._told = self._clock()
        self._done = 0
        self._tokens = 0
        self._bar: Progress | None = None
        if self._console.is_terminal:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rates]}"),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task(what, total=total, rates="")

    def add(self, count: int = 1, *, tokens: int = 0) -> None:
        """Adds `count` finished items, which took `tokens` sampled tokens."""
        self._done += count
        self._tokens += tokens
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, rates=self._rates())
        elif self._clock() - self._told >= _EVERY:
            self._told = self._clock()
            self._line()

    def __enter__(self) -> Steps:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
        else:
            self._line()

    def _line(self) -> None:
        left = ""
        if self._total is not None and 0 < self._done < self._total:
            seconds = (self._clock() - self._started) / self._done * (self._total - self._done)
            left = f", about {duration(seconds)} left"
        of = "" if self._total is None else f" of {self._total}"
        text = f"{self._done}{of} {self._what}, {self._rates()}{left}"
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _rates(self) -> str:
        seconds = max(self._clock() - self._started, 1e-9)
        tokens = f", {self._tokens / seconds:.0f} tokens/s" if self._tokens else ""
        rate = self._done / seconds
        return f"{rate:.0f}/s{tokens}" if rate >= 100 else f"{rate:.3g}/s{tokens}"
