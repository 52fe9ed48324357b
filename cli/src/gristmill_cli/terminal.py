"""A run in the terminal: the live view, and the summary at its end. `make local` and `gristmill status` show them.

Text of a model is shown by `Text`, never as rich's markup, and with control characters visible.
"""

from __future__ import annotations

import io
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gristmill.errors import GristmillError
from gristmill.run import RunState
from gristmill_view.facts import Service
from gristmill_view.overview import EvaluationPoint, Overview
from gristmill_view.samples import Sample, one_line

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = "_.-:=+*#"
_SPARK_WIDTH = 32
_DOTS: Final = {"up": ("●", "green"), "waiting": ("●", "yellow"), "down": ("●", "red"), "done": ("●", "blue")}
_UNKNOWN = ("○", "dim")
_EVERY = 1.0
"""Seconds between two reads of a run."""


def show_any_text() -> None:
    """Lets standard output escape the characters that its encoding lacks, as standard error does. A command, or a run,
    does not end because of a character in a completion."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@dataclass(frozen=True)
class Screen:
    """Everything that the view shows."""

    overview: Overview
    rows: Sequence[Mapping[str, Any]] = ()
    """The trainer's metrics, for the sparklines."""
    sample: Sample | None = None
    notes: Sequence[str] = ()
    """Warnings, the newest last."""
    footer: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        plain = options.ascii_only or options.encoding.lower() not in ("utf-8", "utf8")
        yield from _parts(self, plain)


def _parts(screen: Screen, plain: bool) -> Iterator[RenderableType]:
    summary = screen.overview
    yield _head(summary)
    if not screen.rows and summary.state == RunState.OPEN:
        yield _services_in_lines(summary.services)
    else:
        yield _figures(summary, screen.rows, plain)
        yield _services_in_a_row(summary.services)
    for waiting in summary.waiting:
        yield Text(f"  {waiting.who} waits for {waiting.awaits}", style="dim", no_wrap=True, overflow="ellipsis")
    for trouble in summary.troubles[:3]:
        yield Text.assemble(("  ! ", "bold yellow"), (one_line(trouble.text), "yellow"), (f" [{trouble.code}]", "dim"))
        yield Text(f"    {one_line(trouble.remedy)}")
    if screen.sample is not None:
        yield _sample(screen.sample)
    for note in screen.notes[-3:]:
        yield Text(f"  {one_line(note)}", style="yellow", no_wrap=True, overflow="ellipsis")
    if screen.footer:
        yield Text(f"  {screen.footer}", style="dim", no_wrap=True, overflow="ellipsis")


def _head(found: Overview) -> RenderableType:
    steps = "" if found.steps is None else f" of {found.steps}"
    name = Text.assemble((found.run, "bold"), f"  {found.phase}" if not found.step else f"  step {found.step}{steps}")
    if found.state != RunState.OPEN and found.step:
        name.append(f"  {found.state}", style="green" if found.state == RunState.FINISHED else "yellow")
    if found.step and found.phase != found.state and not found.phase.startswith(("training step", "step ")):
        name.append(f"  {found.phase}", style="dim")
    time_left = "" if not found.seconds_left else f"about {duration(found.seconds_left)} left"
    head = Table.grid(padding=(0, 2), expand=True)
    head.add_column(no_wrap=True)
    head.add_column(ratio=1)
    head.add_column(no_wrap=True, justify="right")
    bar = ProgressBar(total=found.steps or 1, completed=min(found.step, found.steps or found.step))
    head.add_row(name, bar if found.steps else "", time_left)
    return head


def _figures(found: Overview, rows: Sequence[Mapping[str, Any]], plain: bool) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(style="dim")
    rewards = [row.get("reward_mean") for row in rows]
    table.add_row("  reward", figure(found.reward), sparkline(rewards, plain=plain), _from(rewards))
    for name in found.reward_parts:
        values = [row.get("reward_parts", {}).get(name) for row in rows]
        table.add_row(
            Text(f"    {one_line(name, 30)}"), figure(found.reward_parts[name]), sparkline(values, plain=plain), ""
        )
    for point in found.evaluations[-1:]:
        table.add_row("  held-out", percent(point.score), "", f"step {point.step}, {point.n} prompts{_before(found)}")
    words = []
    if found.logprob_diff is not None:
        words.append(f"logprob diff {found.logprob_diff:.1e}")
    if found.tokens_per_second is not None:
        words.append(f"{found.tokens_per_second:,.0f} tokens/s")
    if found.seconds_per_step is not None:
        per_step = found.seconds_per_step
        words.append(f"{per_step:.2g} s per step" if per_step < 10 else f"{duration(per_step)} per step")
    queue = found.queue
    if found.live:
        words.append(f"groups: {queue.ready} ready, {queue.leased} leased, {queue.dropped} dropped")
    return Group(table, Text("  " + "   ".join(words), no_wrap=True, overflow="ellipsis"))


def _before(found: Overview) -> str:
    first = found.evaluations[0]
    return "" if len(found.evaluations) == 1 else f"; {percent(first.score)} at step {first.step}"


def _from(values: Sequence[Any]) -> str:
    known_values = _known(values)
    return f"from {known_values[0]:.3f}" if len(known_values) > 1 else ""


def _services_in_a_row(services: Sequence[Service]) -> RenderableType:
    line = Text("  ", no_wrap=True, overflow="ellipsis")
    for service in services:
        dot, style = _DOTS.get(service.state, _UNKNOWN)
        line.append(f"{dot} ", style=style).append(one_line(service.name, 40))
        line.append(f" {service.version}" if service.version else "", style="dim")
        if service.state == "down" and service.heartbeat_s is not None:
            line.append(f" {duration(service.heartbeat_s)} ago", style="red")
        line.append("   ")
    return line


def _services_in_lines(services: Sequence[Service]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(no_wrap=True, overflow="ellipsis")
    for service in services:
        dot, style = _DOTS.get(service.state, _UNKNOWN)
        name = Text.assemble("  ", (dot, style), f" {one_line(service.name, 40)}")
        table.add_row(name, service.state, Text(one_line(service.detail)))
    return table


def _sample(sample: Sample) -> RenderableType:
    title = Text(f"latest completion, reward {sample.reward:.2f}", style="dim")
    body = Text()
    if sample.prompt:
        body.append(one_line(sample.prompt, 300) + "\n", style="dim")
    body.append(one_line(sample.completion, 600) or "(empty)")
    return Panel(body, title=title, title_align="left", border_style="dim", height=None, expand=True)


# --- Words and figures -----------------------------------------------------------------------------------------
def sparkline(values: Sequence[Any], width: int = _SPARK_WIDTH, *, plain: bool = False) -> str:
    """Returns the values as a line of blocks, from their least to their greatest. Means if there are more than
    `width`."""
    known_values = _known(values)
    if len(known_values) < 2:
        return ""
    if len(known_values) > width:
        edges = [round(place * len(known_values) / width) for place in range(width + 1)]
        known_values = [sum(known_values[low:high]) / (high - low) for low, high in itertools.pairwise(edges)]
    low, high = min(known_values), max(known_values)
    blocks = _ASCII_BLOCKS if plain else _BLOCKS
    span = (high - low) or 1.0
    return "".join(blocks[min(int((value - low) / span * len(blocks)), len(blocks) - 1)] for value in known_values)


def _known(values: Sequence[Any]) -> list[float]:
    return [float(value) for value in values if isinstance(value, int | float) and value == value]


def figure(value: float | None) -> str:
    """Returns a reward with three digits after the point."""
    return "–" if value is None else f"{value:.3f}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def duration(seconds: float) -> str:
    """ "8 s", "3 min 20 s", "1 h 20 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s" if whole < 600 else f"{round(whole / 60)} min"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def redraws(console: Console) -> bool:
    """Returns whether a live view can redraw itself there. FORCE_COLOR, as CI sets it, does not make a terminal."""
    return console.file.isatty() and not console.is_dumb_terminal


# --- The live view ---------------------------------------------------------------------------------------------
class LiveView:
    """Redraws a run in place until it is left. A thread reads the run once per second."""

    def __init__(self, console: Console, read: Callable[[], Screen], every: float = _EVERY) -> None:
        """`read`: raises GristmillError if the run cannot be read now; the view then keeps what it had, and says so."""
        self._read = read
        self._every = every
        self.shown: Screen | None = None
        """The last screen that was read."""
        self._problem = ""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="view", daemon=True)
        self._live = Live(
            console=console, get_renderable=self.render, refresh_per_second=2, transient=True, redirect_stdout=False,
            redirect_stderr=False,
        )  # fmt: skip

    def refresh(self) -> None:
        """Reads the run now."""
        try:
            self.shown, self._problem = self._read(), ""
        except GristmillError as error:
            self._problem = str(error)

    def redraw(self) -> None:
        """Reads the run and draws it now, between two reads of the thread."""
        self.refresh()
        self._live.refresh()

    def render(self) -> RenderableType:
        """Returns what the terminal shows."""
        parts: list[RenderableType] = [] if self.shown is None else [self.shown]
        if self._problem:
            parts.append(Text(f"  {one_line(self._problem)}", style="yellow"))
        return Group(*parts)

    def _watch(self) -> None:
        while not self._closed.wait(self._every):
            self.refresh()

    def __enter__(self) -> LiveView:
        self._live.start(refresh=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._closed.set()
        self._thread.join(timeout=5)
        self._live.stop()


# --- The end ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Command:
    """A next step of the user: the purpose, and the exact command lines."""

    purpose: str
    lines: Sequence[str]


def summary(
    found: Overview,
    rows: Sequence[Mapping[str, Any]],
    samples: Sequence[Sample] = (),
    *,
    seconds: float | None = None,
    places: Mapping[str, str] | None = None,
    commands: Sequence[Command] = (),
    plain: bool = False,
) -> Iterator[Text]:
    """Yields the lines of the summary.

    `seconds`: from the start of the services to their end, if the caller knows it. `places`: label to path.
    """
    time = f" in {duration(found.seconds)}" if found.seconds else ""
    time += f" ({duration(seconds)} with the start and the end of the services)" if seconds else ""
    yield Text.assemble(("run ", ""), (found.run, "bold"), f" is {found.state}: {found.step} steps{time}")
    rewards = [row.get("reward_mean") for row in rows]
    yield _change("reward", rewards, sparkline(rewards, plain=plain))
    for name in found.reward_parts:
        yield _change(f"  {one_line(name, 24)}", [row.get("reward_parts", {}).get(name) for row in rows])
    if found.evaluations:
        yield _held_out(found.evaluations)
    dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(found.dropped.items(), key=lambda p: -p[1]))
    yield _line("groups", f"{found.queue.trained} trained, {dropped + ' dropped' if dropped else 'none dropped'}")
    if found.receipts is not None:
        yield _line("receipts", f"{found.receipts.proven} of {found.receipts.publications} publications proven")
    for trouble in found.troubles:
        yield _line("trouble", f"{one_line(trouble.text)} [{trouble.code}]", "yellow")
        yield _line("", one_line(trouble.remedy))
    for place, sample in enumerate(samples):
        text = f"{sample.reward:.2f}  {one_line(sample.prompt, 60)}  →  {one_line(sample.completion, 100)}"
        yield _line("samples" if place == 0 else "", text)
    for label, path in (places or {}).items():
        yield _line(label, path)
    for command in commands:
        for place, line in enumerate(command.lines):
            yield _line(command.purpose if place == 0 else "", line, "cyan")


def _change(label: str, values: Sequence[Any], spark: str = "") -> Text:
    known_values = _known(values)
    if not known_values:
        return _line(label, "–")
    return _line(label, f"{known_values[0]:.3f} → {known_values[-1]:.3f}  {spark}".rstrip())


def _held_out(points: Sequence[EvaluationPoint]) -> Text:
    last = points[-1]
    before = f"{percent(points[0].score)} → " if len(points) > 1 else ""
    interval = "" if last.low is None or last.high is None else f", 95 % {percent(last.low)} to {percent(last.high)}"
    return _line("held-out accuracy", f"{before}{percent(last.score)}  ({last.n} prompts{interval})")


def _line(label: str, text: str, style: str = "") -> Text:
    return Text.assemble((f"  {label:<18} ", "dim"), (text, style))
