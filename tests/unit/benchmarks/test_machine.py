"""The facts that a benchmark's results name."""

from __future__ import annotations

import sys

import pytest
from benchmarks import machine

from secure import ROOT


@pytest.mark.parametrize(
    ("program", "command"),
    [
        ("benchmarks/api/__main__.py", "python -m benchmarks api --quick"),
        ("benchmarks/durability.py", "python -m benchmarks durability --quick"),
    ],
)
def test_results_name_the_command_without_a_folder_of_the_machine(
    program: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(ROOT / program), "--quick"])
    assert machine.command() == command
