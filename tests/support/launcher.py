"""The launcher script as a process."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from tests.support.ports import free_port
from tests.support.stack import ROOT, Vllm

SCRIPT = ROOT / "scripts" / "launch_local_dataset_run.py"


def launch(tmp_path: Path, vllm: Vllm, *arguments: str) -> tuple[subprocess.Popen[str], int]:
    """Starts the launcher attached to a running server, with a separate state folder."""
    state = tmp_path / "state"
    if not state.exists():
        state.mkdir()
        # The launcher's stack and the running server share their folders, as they do by default.
        (state / "models").symlink_to(vllm.models_dir)
        (state / "weights").symlink_to(vllm.weights_dir)
    port = free_port()
    command = [sys.executable, str(SCRIPT), "--state_dir", str(state), "--runs_dir", str(tmp_path / "runs")]
    command += ["--api_port", str(port), "--model_port", vllm.url.rsplit(":", 1)[1], *arguments]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=_hear_ctrl_c
    )
    return process, port


def _hear_ctrl_c() -> None:
    """A shell starts background processes with Ctrl-C ignored, and child processes inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
