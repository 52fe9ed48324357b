"""Output of the commands: text that a model may have written, tables, and the progress of long work."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from gristmill.internal.logs import CONTROL
from gristmill_env.progress import duration
from gristmill_env.saved.summary import GroupStats, Values, figure, quantile
from gristmill_env.values import whole


def plain(text: str) -> Text:
    """Returns text without rich's [markup] and a terminal's control characters, both of which a model may write."""
    return Text(CONTROL.sub(lambda found: found[0] if found[0] in "\n\t" else "\ufffd", whole(text)))


def say(console: Console, text: str, style: str = "") -> None:
    """Prints a line of text as it is, without breaking it."""
    console.print(plain(text), style=style, soft_wrap=True)


def show_summary(console: Console, summary: GroupStats) -> None:
    """Prints a table of the rewards, and a line of totals."""
    table = Table("reward", "mean", "min", "max", "no score")
    for name, values in {**summary.parts, "total": summary.rewards}.items():
        table.add_row(plain(name), *_numbers(values))
    console.print(table)
    words = [f"{summary.groups} groups", f"{summary.completions} completions"]
    if summary.tokens:
        words.append(
            f"{sum(summary.tokens) / len(summary.tokens):.0f} tokens on average (90 % have "
            f"{quantile(summary.tokens, 0.9)} or fewer)"
        )
    words.append(f"{summary.truncated} cut at max_tokens")
    words.append(f"{summary.same} groups of one score")
    if summary.failed:
        words.append(f"a reward failed on {summary.failed}")
    say(console, ", ".join(words))


def _numbers(values: Values) -> tuple[str, str, str, str]:
    low, high = (figure(values.low), figure(values.high)) if values.count else ("none", "none")
    return figure(values.mean), low, high, str(values.unscored)


_EVERY = 10.0
"""Seconds between plain lines."""


class Steps:
    """Counts finished items out of `total`, and shows rates and the remaining time.

    On a terminal the progress is a bar on standard error, otherwise a line every few seconds.
    """

    def __init__(
        self,
        what: str,
        total: int | None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        done: int = 0,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """`what`: the counted items, in the plural. `total`: None if unknown. `console`: standard error if None.
        `clock`: seconds. `done`: items finished earlier; they count, but not for the rates. `say`: receives the lines,
        instead of the console; no bar is shown."""
        self._clock = clock
        self._what = what
        self._total = total
        self._started = self._told = self._clock()
        self._before = self._done = done
        self._tokens = 0
        console = console or Console(file=sys.stderr)
        self._say = say or functools.partial(console.print, highlight=False, markup=False, soft_wrap=True)
        self._bar: Progress | None = None
        if say is None and console.is_terminal:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rates]}"),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task(what, total=total, completed=done, rates="")

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

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        else:
            self._line()

    def _line(self) -> None:
        time_left, new = "", self._done - self._before
        if self._total is not None and new > 0 and self._done < self._total:
            seconds = (self._clock() - self._started) / new * (self._total - self._done)
            time_left = f", about {duration(seconds)} left"
        of = "" if self._total is None else f" of {self._total}"
        self._say(f"{self._done}{of} {self._what}, {self._rates()}{time_left}")

    def _rates(self) -> str:
        seconds = max(self._clock() - self._started, 1e-9)
        tokens = f", {self._tokens / seconds:.0f} tokens/s" if self._tokens else ""
        rate = (self._done - self._before) / seconds
        return f"{rate:.0f}/s{tokens}" if rate >= 100 else f"{rate:.3g}/s{tokens}"
