"""python -m benchmarks: lists the benchmarks, and starts one of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.__main__ import BENCHMARKS, command

from secure import ROOT

FOLDER = ROOT / "benchmarks"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs with Python alone: the list needs no package."""
    environ = {"PATH": "/usr/bin:/bin"}
    return subprocess.run(
        [sys.executable, "-S", "-m", "benchmarks", *arguments], cwd=ROOT, env=environ, capture_output=True, text=True
    )


def test_every_program_of_the_folder_is_listed() -> None:
    programs = [*FOLDER.glob("*.py"), *FOLDER.glob("*/__main__.py")]
    started = {path for path in programs if "script.parser(" in path.read_text()}
    assert {path.parent.name if path.name == "__main__.py" else path.stem for path in started} == set(BENCHMARKS)


def test_without_a_name_each_benchmark_has_a_line() -> None:
    done = run()
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()[-len(BENCHMARKS) :]] == list(BENCHMARKS)


def test_unknown_name_is_refused_with_the_list() -> None:
    done = run("speed")
    assert done.returncode == 2
    assert "speed" in done.stderr
    assert all(name in done.stderr for name in BENCHMARKS)


@pytest.mark.parametrize("name", ["wrong_weights", "api"])
def test_command_runs_the_module_with_the_options_after_the_default_folder(name: str) -> None:
    python, *words = command(name, ["--results", "elsewhere"])
    assert Path(python) == Path(sys.executable)
    assert words == ["-m", f"benchmarks.{name}", "--results", "benchmarks/results", "--results", "elsewhere"]
