"""A wrong flag costs less than a second: each program reads its command line before it imports torch or fastapi."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.support.grids import rest_is_long

WITHOUT_TORCH = """
import runpy, sys
for heavy in ("torch", "transformers", "fastapi"):
    sys.modules[heavy] = None
module, *sys.argv[1:] = sys.argv[1:]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "flags", "code", "said"),
    rest_is_long(
        ("gristmill_trainer", ["--learnin_rate", "1"], 1, "[unknown_flag]"),
        ("gristmill_env", ["--learnin_rate", "1"], 1, "[unknown_flag]"),
        ("gristmill_model", ["--modle"], 2, "--modle"),
        ("gristmill_api", ["--prot", "1"], 2, "--prot"),
        ("gristmill_cli", ["run", "--modle", "tiny"], 2, "--modle"),
        ("gristmill_trainer", ["--learning_rate", "fast"], 1, "[invalid_settings]"),
        ("gristmill_trainer.per_gpu", ["--learnin_rate", "1"], 1, "[unknown_flag]"),
        ("gristmill_env.local_server", ["--group_sice", "1"], 1, "[unknown_flag]"),
        first=5,
    ),
)
def test_programs_refuse_a_wrong_flag_before_their_slow_imports(
    program: str, flags: list[str], code: int, said: str
) -> None:
    started = [sys.executable, "-c", WITHOUT_TORCH, program, *flags]
    done = subprocess.run(started, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
