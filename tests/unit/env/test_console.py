"""Output of the commands: progress of long work, on a terminal and elsewhere, and text as it is."""

from __future__ import annotations

import io

from rich.console import Console

from gristmill_env.console import Steps, plain, say


def test_progress_without_a_terminal_prints_plain_lines() -> None:
    now = [100.0]
    out = io.StringIO()
    with Steps("groups", 100, Console(file=out, width=30), lambda: now[0]) as steps:
        for _ in range(12):
            now[0] += 2.0
            steps.add(tokens=50)
        assert out.getvalue().splitlines() == [
            "5 of 100 groups, 0.5/s, 25 tokens/s, about 3 min left",
            "10 of 100 groups, 0.5/s, 25 tokens/s, about 3 min left",
        ]
    assert out.getvalue().splitlines()[-1] == "12 of 100 groups, 0.5/s, 25 tokens/s, about 3 min left"


def test_progress_reports_the_remaining_time_in_readable_units() -> None:
    now = [0.0]
    told = []
    for seconds, total in ((1.0, 9), (60.0, 82), (60.0, 81), (1.0, 1)):
        out = io.StringIO()
        with Steps("groups", total, Console(file=out), lambda: now[0]) as steps:
            now[0] += seconds
            steps.add()
        told.append(out.getvalue().strip().partition("left")[0].rpartition(", ")[2])
    assert told[:3] == ["about 8 s ", "about 1 h 21 min ", "about 1 h 20 min "]
    assert "about" not in told[3]


def test_text_is_shown_as_it_is_without_control_characters() -> None:
    text = "def f():\n\treturn 1\u00a0%  \U0001f468\u200d\U0001f469 \u3000x"
    assert plain(text).plain == text
    assert plain("a\x1b[31m\u202eb\ud83d").plain == "a\ufffd[31m\ufffdb\ufffd"


def test_progress_on_a_terminal_is_a_bar() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with Steps("groups", 4, console) as steps:
        steps.add(3, tokens=10)
    assert "3/4" in out.getvalue()
    assert "tokens/s" in out.getvalue()


def test_progress_of_resumed_work_excludes_earlier_items_from_the_rate() -> None:
    now = [0.0]
    told: list[str] = []
    with Steps("prompts evaluated", 50, clock=lambda: now[0], done=40, say=told.append) as steps:
        now[0] += 20.0
        steps.add(4)
        assert told == ["44 of 50 prompts evaluated, 0.2/s, about 30 s left"]
        steps.add(6)
    assert told[1:] == ["50 of 50 prompts evaluated, 0.5/s"]


def test_say_prints_text_without_markup_in_one_line() -> None:
    out = io.StringIO()
    say(Console(file=out, width=20), "groups: runs/[red]/groups.jsonl 1234567890\x1b[2J")
    assert out.getvalue() == "groups: runs/[red]/groups.jsonl 1234567890\ufffd[2J\n"
