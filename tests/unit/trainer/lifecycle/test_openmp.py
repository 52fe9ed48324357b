"""OpenMP's settings in the trainer's process, as reported by the library itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

UNTIL_TORCH_IS_LOADED = """
import sys
class Ends:
    def find_spec(self, name, *rest):
        if name == "transformers":
            sys.exit()
sys.meta_path.insert(0, Ends())
sys.argv = ["gristmill_trainer"]
from gristmill_trainer.__main__ import main
main()
"""
"""Starts the trainer up to the package that it imports after torch, because the others take seconds."""


@pytest.mark.long
@pytest.mark.parametrize(("wanted", "sleeps"), [(None, True), ("ACTIVE", False)])
def test_openmp_threads_sleep_while_waiting_by_default(wanted: str | None, sleeps: bool) -> None:
    environ = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    environ |= {"OMP_DISPLAY_ENV": "VERBOSE"} | ({} if wanted is None else {"OMP_WAIT_POLICY": wanted})
    command = [sys.executable, "-c", UNTIL_TORCH_IS_LOADED]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=120)
    assert "GOMP_SPINCOUNT" in done.stderr
    assert ("GOMP_SPINCOUNT = '0'" in done.stderr) == sleeps
