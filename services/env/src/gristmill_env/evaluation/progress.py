"""Progress of an evaluation: a bar on a terminal, otherwise a plain line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_SPEAK_EVERY = 10.0


class EvaluationProgress:
    """Shows the number of finished prompts. Use it as a context."""

    def __init__(self, prompts: int, done: int, *, console: Console | None, say: Callable[[str], None]) -> None:
        """`done`: prompts finished earlier; they count, but not for the rate. `console`: shows a bar on a terminal.
        `say` receives plain lines if `console` is None or not a terminal."""
        self._prompts = prompts
        self._before = self._done = done
        self._tokens = 0
        self._say = None if console is not None and console.is_terminal else say
        self._started = self._spoke = time.monotonic()
        self._bar = Progress(
            TextColumn("evaluate"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=self._say is not None,
        )
        self._task = self._bar.add_task("", total=prompts, completed=done, rate="")

    def add(self, tokens: int) -> None:
        """Counts a finished prompt with `tokens` tokens in its completions."""
        self._done += 1
        self._tokens += tokens
        self._bar.update(self._task, completed=self._done, rate=self._rate())
        now = time.monotonic()
        if self._say is not None and (now - self._spoke >= _SPEAK_EVERY or self._done == self._prompts):
            self._spoke = now
            self._say(str(self))

    def __str__(self) -> str:
        left = (self._prompts - self._done) * self._seconds() / max(1, self._done - self._before)
        return f"evaluate: {self._done} of {self._prompts} prompts, {self._rate()}, about {left:.0f} s left"

    def __enter__(self) -> EvaluationProgress:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def _seconds(self) -> float:
        return max(time.monotonic() - self._started, 1e-9)

    def _rate(self) -> str:
        seconds = self._seconds()
        return f"{(self._done - self._before) / seconds:.1f} prompts/s, {self._tokens / seconds:.0f} tokens/s"
