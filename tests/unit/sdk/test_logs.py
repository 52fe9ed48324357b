"""A log line is one line of printable text, whatever a client, a model or a library puts into it."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gristmill.internal import logs

CONTROL = [*map(chr, range(0x20)), *map(chr, range(0x7F, 0xA0)), *"\u2028\u2029\u202e\u2066\u200f"]


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """The standard error of a service."""
    root, source_file = logging.getLogger(), logging._srcfile
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()  # force=True would close pytest's
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    logs.setup("test")
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)
    logging._srcfile = source_file


@pytest.mark.parametrize("char", CONTROL, ids=ascii)
def test_line_escapes_control_characters_in_values_keys_and_event(char: str) -> None:
    written = logs.line(f"eve{char}nt", **{f"ke{char}y": f"val{char}ue", "error": ValueError(f"a{char}b")})
    assert written.isprintable()
    assert written == logs.line("eve@nt", **{"ke@y": f"val{char}ue", "error": f"a{char}b"}).replace(
        "@", repr(char)[1:-1]
    )
    assert repr(f"val{char}ue") in written


def test_line_leaves_printable_text_as_it_is() -> None:
    assert logs.line("submit", run="a", name="Grüße☃", seconds=0.4213, none=None) == (
        "submit run=a name=Grüße☃ seconds=0.421 none=None"
    )
    assert logs.line("x", why="two words") == "x why='two words'"


@pytest.mark.parametrize("char", CONTROL, ids=ascii)
def test_message_of_any_logger_is_one_line_without_control_characters(output: io.StringIO, char: str) -> None:
    logging.getLogger("some.library").warning("path %s", f"a{char}12:00:00 test ERROR forged")
    (written,) = output.getvalue().removesuffix("\n").split("\n")
    assert written.isprintable()
    assert written.endswith(f"WARNING path a{repr(char)[1:-1]}12:00:00 test ERROR forged")


def test_traceback_keeps_its_lines_and_none_looks_like_a_log_line(output: io.StringIO) -> None:
    try:
        raise ValueError("bad\n12:00:00 test    ERROR   forged\x1b[2J\r")
    except ValueError:
        logging.getLogger("some.library").exception("failed")
    first, *others = output.getvalue().removesuffix("\n").split("\n")
    assert first.endswith("ERROR   failed")
    assert "  Traceback (most recent call last):" in others
    assert r"  12:00:00 test    ERROR   forged\x1b[2J\r" in others
    assert all(text.startswith("  ") and text.isprintable() for text in others)


def test_traceback_of_another_process_keeps_its_lines(output: io.StringIO) -> None:
    trace = 'Traceback (most recent call last):\n  File "a.py"\nValueError: bad\x1b\n'
    logging.getLogger("some.library").error("reward failed", extra={"trace": trace})
    first, *others = output.getvalue().removesuffix("\n").split("\n")
    assert first.endswith("ERROR   reward failed")
    assert others == ["  Traceback (most recent call last):", '    File "a.py"', r"  ValueError: bad\x1b"]


@pytest.mark.slow
def test_weights_and_biases_logs_without_errors(tmp_path: Path) -> None:
    """W&B's own log file formats the process id as a number, so `logging.logProcesses` must stay on."""
    program = f"""
import pathlib
from gristmill.internal import logs
from gristmill.internal.tracking import start_wandb
logs.setup("env")
run = start_wandb("run-1", "env", {{}}, pathlib.Path({str(tmp_path)!r}), {{"WANDB_MODE": "offline"}})
run.log({{"loss": 1.0}})
run.finish()
"""
    environ = {**os.environ, "WANDB_MODE": "offline", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "Logging error" not in done.stderr
    assert "TypeError" not in done.stderr
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
