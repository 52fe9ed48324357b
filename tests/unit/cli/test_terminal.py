"""The terminal's view and summary, rendered from recorded values."""

from __future__ import annotations

import io
import threading
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from tests.unit.view.recorded import record, rows, status

from gristmill import GristmillError, RunState
from gristmill_cli.terminal import Command, LiveView, Screen, duration, sparkline, summary
from gristmill_view.facts import Facts, Service
from gristmill_view.overview import overview
from gristmill_view.samples import Sample

SAMPLE = Sample("g00000412", "What is 97 + 3?", "<answer>100</answer>", 1.0, {"format": 1.0}, "stop", "1.8")
FACTS = Facts(
    run="quickstart", state=RunState.OPEN, rows=rows(), record=record(), status=status(), version="1.8", steps=60,
    evaluations=[{"step": 0, "pass@1": 0.04, "pass@1_stderr": 0.01, "prompts": 200}],
    services=[
        Service(name="api", state="up"), Service(name="model", state="up", version="1.8"),
        Service(name="env", state="down", heartbeat_s=70.0),
    ],
)  # fmt: skip


def console(*, terminal: bool = True, encoding: str = "utf-8", width: int = 100) -> Console:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    return Console(file=file, force_terminal=terminal, width=width, color_system=None, legacy_windows=False)


def rendered(screen: Screen, **options: Any) -> str:
    target = console(**options)
    with target.capture() as captured:
        target.print(screen)
    return captured.get()


def test_view_of_a_run_fits_on_one_small_screen() -> None:
    text = rendered(Screen(overview(FACTS), FACTS.rows, SAMPLE, ["env: slow"], "full output: runs/quickstart/logs"))
    assert len(text.splitlines()) <= 16
    assert max(map(len, text.splitlines())) <= 100
    for part in (
        "step 8 of 60", "about 57 s left", "0.520", "from 0.225", "accuracy", "4.0 %", "logprob diff 2.5e-07",
        "2,000 tokens/s", "● model 1.8", "● env 1 min 10 s ago", "trainer waits for groups: 4 of 16 are ready",
        "What is 97 + 3?", "<answer>100</answer>", "reward 1.00", "env: slow", "runs/quickstart/logs",
    ):  # fmt: skip
        assert part in text, part


def test_view_of_a_start_shows_each_service_and_its_phase() -> None:
    services = [Service(name="redis", state="up"), Service(name="model", state="waiting", detail="loading 400/800")]
    starting = Facts(run="quickstart", state=RunState.OPEN, services=services, phase="model: loading 400/800", steps=60)
    text = rendered(Screen(overview(starting)))
    assert "quickstart  model: loading 400/800" in text
    assert [line.split()[1:3] for line in text.splitlines() if "●" in line] == [["redis", "up"], ["model", "waiting"]]


def test_trouble_is_shown_with_code_and_remedy() -> None:
    text = rendered(Screen(overview(replace(FACTS, status=status(dead=3))), FACTS.rows))
    assert "3 groups" in text
    assert "[dead_letters]" in text
    assert "GET /v1/runs/quickstart/dead" in text


@pytest.mark.parametrize("width", [40, 60, 200])
def test_view_keeps_within_the_width_of_the_terminal(width: int) -> None:
    services = [Service(name=f"env {number}", state="up", detail="x" * 300) for number in range(30)]
    found = overview(replace(FACTS, services=services, status=status(dead=3)))
    text = rendered(Screen(found, FACTS.rows, SAMPLE, ["w" * 500], "f" * 500), width=width)
    assert max(map(len, text.splitlines())) <= width


def test_text_of_a_model_neither_controls_the_terminal_nor_is_markup() -> None:
    hostile = SAMPLE._replace(prompt="[red]x[/red] \u202e", completion="\x1b]0;title\x07[bold]y\r\nz\x9b2J")
    service = Service(name="[blink]env", state="down", detail="[link=x]\x1b[2J")
    facts = replace(FACTS, services=[service])
    text = rendered(Screen(overview(facts), FACTS.rows, hostile, ["[red]\x1b[31m"]))
    text += rendered(Screen(overview(replace(facts, rows=())), ()))
    assert "[bold]y" in text
    assert "[red]x[/red]" in text
    assert "[blink]env" in text
    assert "[link=x]" in text
    for control in ("\x1b", "\x07", "\r", "\x9b", "\u202e"):
        assert control not in text, repr(control)


def test_view_is_readable_in_a_terminal_without_unicode() -> None:
    text = rendered(Screen(overview(FACTS), FACTS.rows), encoding="ascii")
    assert not any(block in text for block in "▁▂▃▄▅▆▇█")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], ""), ([0.5], ""), ([0, 1], "▁█"), ([0.5, 0.5], "▁▁"), ([0, None, "nan", float("nan"), 1], "▁█"),
        (list(range(8)), "▁▂▃▄▅▆▇█"), (list(range(800)), "▁▁▁▁▂▂▂▂▃▃▃▃▄▄▄▄▅▅▅▅▆▆▆▆▇▇▇▇████"),
    ],
)  # fmt: skip
def test_sparkline_scales_values_to_bars(values: list[Any], expected: str) -> None:
    assert sparkline(values) == expected


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 0 s"), (65, "1 min 5 s"), (1800, "30 min"), (5000, "1 h 23 min")]
)
def test_duration_is_written_in_readable_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_figures_are_whole_in_a_terminal_of_80_columns() -> None:
    evaluations = [{**FACTS.evaluations[0], "step": 3}, {**FACTS.evaluations[0], "step": 36, "pass@1": 0.2}]
    many = [dict(row) for _ in range(5) for row in rows()]
    text = rendered(Screen(overview(replace(FACTS, evaluations=evaluations)), many), width=80)
    assert "20.0 %" in text
    assert "…" not in text.partition("held-out")[0]


def test_summary_compares_first_and_last_and_names_the_next_commands() -> None:
    evaluations = [*FACTS.evaluations, {"step": 60, "pass@1": 0.93, "pass@1_stderr": 0.018, "prompts": 200}]
    dropped = {"same_scores": 3, "too_long": 9}
    facts = replace(FACTS, state=RunState.FINISHED, evaluations=evaluations, dropped=dropped)
    commands = [Command("train longer", ['make local ARGS="--training_steps 120"'])]
    lines = [
        line.plain
        for line in summary(
            overview(facts), rows(), [SAMPLE], seconds=125, places={"model": "runs/q/model"}, commands=commands
        )
    ]
    text = "\n".join(lines)
    steps = overview(facts).seconds
    assert steps is not None
    assert lines[0].startswith(f"run quickstart is finished: 8 steps in {duration(steps)} (2 min 5 s ")
    for part in (
        "0.225 → 0.520", "4.0 % → 93.0 %  (200 prompts, 95 % 89.5 % to 96.5 %)",
        "128 trained, 9 too_long, 3 same_scores dropped", "1.00  What is 97 + 3?  →  <answer>100</answer>",
        "runs/q/model", 'make local ARGS="--training_steps 120"',
    ):  # fmt: skip
        assert part in text, part


def test_live_view_keeps_what_it_had_while_the_run_cannot_be_read() -> None:
    answers = iter([Screen(overview(FACTS), FACTS.rows)])
    failed = threading.Event()

    def read() -> Screen:
        for screen in answers:
            return screen
        failed.set()
        raise GristmillError("api_unreachable", "the API does not answer")

    target = console(terminal=True)
    with LiveView(target, read, every=0.01) as view:
        assert failed.wait(5)
        view.refresh()
        with target.capture() as captured:
            target.print(view.render())
    assert "step 8 of 60" in captured.get()
    assert "the API does not answer" in captured.get()
