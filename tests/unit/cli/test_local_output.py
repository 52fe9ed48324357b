"""The local launcher's output: one line per step without a terminal, the live view on a terminal."""

from __future__ import annotations

import io
import json
import math
import os
import shlex
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from tests.unit.view.recorded import LOGS, record

from gristmill.archive.run_file import write_run_file
from gristmill_cli.local.local_run import LocalRun, next_commands, show_context
from gristmill_cli.local.options import read_options
from gristmill_cli.local.output import LiveOutput, Output, StepLines, choose
from gristmill_cli.local.processes import LocalStack

STEP = "05:49:03 trainer INFO    step 1/60  reward 0.225  loss +0.0292  version 1.1  seconds: wait 0.41 pack 0.01"


@pytest.fixture
def run(tmp_path: Path) -> LocalRun:
    return LocalRun("quickstart", 60, tmp_path / "quickstart", tmp_path / "models", "http://127.0.0.1:1")


def test_lines_without_a_terminal_are_steps_phases_and_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    output = StepLines()
    for name, text in LOGS.items():
        for line in text.splitlines():
            output.line(name, line)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "api: answers",
        "model: the model server starts with tiny",
        "model: loading the weights 0/2",
        "env: 800 rows are loaded",
        "env: waits for the trainer",
        "env: 44 of the last 48 groups were dropped as same_scores: raise temperature",
        "trainer: loads a model of 0.6M parameters",
        "trainer: publishes the weights of step 0",
        "step 1/60  reward 0.225  loss +0.0292  grad_norm 0.839  logprob_diff 2.5e-07  version 1.1",
    ]


def test_output_omits_weights_loaded_at_a_publication(capsys: pytest.CaptureFixture[str]) -> None:
    output = StepLines()
    load = "Loading safetensors checkpoint shards: 100% Completed | 1/1 [00:00<00:00, 48.79it/s]"
    for line in (load, "INFO:     Application startup complete.", load, load):
        output.line("model", line)
    assert capsys.readouterr().out.splitlines() == ["model: loading the weights 1/1", "model: answers"]


def test_warning_that_repeats_is_shown_three_times(capsys: pytest.CaptureFixture[str]) -> None:
    output = StepLines()
    for number in range(100):
        output.line("env", f"05:49:05 env     WARNING {number} of the last 48 groups were dropped\x1b[2J")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert "\x1b" not in "".join(lines)


def test_verbose_prints_every_line_after_the_name_of_the_service(
    run: LocalRun, capsys: pytest.CaptureFixture[str]
) -> None:
    output = choose(run, Path("logs"), verbose=True)
    assert type(output) is Output
    output.line("env", "anything")
    assert capsys.readouterr().out == "env     | anything\n"


def test_output_without_a_terminal_is_lines(run: LocalRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert isinstance(choose(run, Path("logs"), verbose=False), StepLines)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert isinstance(choose(run, Path("logs"), verbose=False), StepLines)


@pytest.mark.parametrize(("term", "expected"), [("xterm-256color", LiveOutput), ("dumb", StepLines)])
def test_output_on_a_terminal_is_live_unless_it_is_dumb(
    run: LocalRun, monkeypatch: pytest.MonkeyPatch, term: str, expected: type
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", term)
    assert isinstance(choose(run, Path("logs"), verbose=False), expected)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[LocalStack]:
    with LocalStack(lambda name, line: None, logs=tmp_path / "logs") as found:
        yield found


def test_live_view_shows_services_before_there_is_an_api(run: LocalRun, stack: LocalStack) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    output = LiveOutput(run, console, "full output: logs")
    run.attach(stack)
    redis = stack.start("redis", [sys.executable, "-c", "import time; time.sleep(60)"])
    stack.wait_until(redis, lambda: True, 5)
    stack.start("model", [sys.executable, "-c", "import time; time.sleep(60)"])
    output.line("model", "05:48:35 model   INFO    warm start step=400/800 loss=1.2")
    with output, console.capture() as captured:
        output.say("using [this] \x1b[2J")
        console.print(output.screen())
    text = captured.get()
    assert "using [this] \\x1b[2J" in text
    assert "model: building the model 400/800" in text
    states = {line.split()[1]: line.split()[2] for line in text.splitlines() if "●" in line}
    assert {"redis": "up", "model": "waiting"}.items() <= states.items()


def test_service_that_ended_is_down_with_its_error(run: LocalRun, stack: LocalStack) -> None:
    run.attach(stack)
    trainer = stack.start("trainer", [sys.executable, "-c", "print('error: no GPU'); raise SystemExit(1)"])
    trainer.process.wait()
    trainer.reader.join()
    service = next(service for service in run.facts().services if service.name == "trainer")
    assert (service.state, service.detail) == ("down", "no GPU")


def test_live_view_shows_the_phase_of_an_evaluation_and_of_the_end(run: LocalRun) -> None:
    from gristmill_view.phases import meaning

    run.heard("trainer", meaning(STEP))
    assert run.facts().phase == ""
    run.heard("env", meaning("05:49:09 env     INFO    120 of 200 prompts evaluated, 40/s"))
    assert run.facts().phase == "evaluates 120/200 prompts"
    run.close()
    assert run.facts().phase == "stopping the services"


def test_context_of_a_failure_is_the_end_of_its_log_without_lines_of_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "trainer.log"
    log.write_text("".join(f"line {number}\x1b\n" for number in range(100)))
    show_context(log)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"  line {number}\\x1b" for number in range(88, 100)]
    log.write_text(
        "an error of the start before\n--- started 2026-11-26 12:00:00, process 1\n"
        "Traceback\n"
        + "12:00:00 env     INFO    score prompt=g1\n" * 100
        + 'INFO:     127.0.0.1:4 - "POST /collective_rpc HTTP/1.1" 200 OK\n' * 9
        + "(EngineCore pid=7) INFO 11-27 04:00:00 [core.py:9] reloaded\n" * 9
        + "12:00:01 env     ERROR   no reward\n"
    )
    show_context(log)
    assert capsys.readouterr().out.splitlines() == ["  Traceback", "  12:00:01 env     ERROR   no reward"]
    show_context(tmp_path / "missing.log")
    show_context(None)


def test_next_commands_select_this_run_and_quote_its_paths(tmp_path: Path) -> None:
    folder = tmp_path / "my runs" / "mine"
    options = read_options(["my config.yaml", "--run_id", "mine", "--model_port", "9002", "--fresh"], "gristmill run")
    commands = next_commands(options, tmp_path, folder, steps=60, question="What's 2 - 1?")
    lines = {command.purpose: command.lines for command in commands}
    assert lines["train longer"] == [
        ".venv/bin/gristmill run 'my config.yaml' --run_id mine --model_port 9002 --training_steps 120"
    ]
    serve = f".venv/bin/gristmill model start --model '{folder}/model' --model_port 9002"
    assert lines["serve it"] == [serve]
    asked = json.loads(shlex.split(lines["chat with it"][0])[-1])
    assert asked["messages"] == [{"role": "user", "content": "What's 2 - 1?"}]
    assert lines["evaluate it"] == [
        f".venv/bin/gristmill --runs '{folder.parent}' evaluate 'my config.yaml' --model '{folder}/model' "
        "--run_id mine --base_url http://127.0.0.1:9002"
    ]
    later = next_commands(options, tmp_path, folder, steps=60, question="", stays=True)
    assert later[0].lines == [f".venv/bin/gristmill model stop --model_port 9002 && {serve}"]
    assert lines["see it"] == [f".venv/bin/gristmill --runs '{folder.parent}' view mine"]


def test_launcher_waits_for_the_report_of_this_start_and_the_summary_names_it(run: LocalRun, tmp_path: Path) -> None:
    folder = tmp_path / "quickstart"
    folder.mkdir()
    report = folder / "report.html"
    report.write_text("of the run before it was extended")
    os.utime(report, (1000, 1000))
    write_run_file(folder, record())
    began = time.monotonic()
    run.wait_for_report(seconds=0.5)
    assert time.monotonic() - began >= 0.5
    assert str(report) not in "\n".join(line.plain for line in run.end([]))
    new = tmp_path / "new.html"
    new.write_text("new")
    writer = threading.Timer(0.5, new.replace, [report])
    writer.start()
    run.wait_for_report(seconds=60)
    assert report.read_text() == "new"
    assert str(report) in "\n".join(line.plain for line in run.end([]))


def test_launcher_does_not_wait_for_a_report_without_an_archive(run: LocalRun, tmp_path: Path) -> None:
    (tmp_path / "quickstart").mkdir()
    run.wait_for_report(seconds=math.inf)
