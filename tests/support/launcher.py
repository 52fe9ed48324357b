"""The launcher script as a process, with its output in a pipe or on a pseudo-terminal."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path

from tests.support.ports import free_port
from tests.support.stack import ROOT, Vllm

SCRIPT = ROOT / "scripts" / "launch_local_dataset_run.py"


class Terminal:
    """A pseudo-terminal that a process writes to. A thread reads what it shows."""

    def __init__(self, command: list[str], columns: int = 100) -> None:
        """Starts `command` on the terminal."""
        self._master, slave = pty.openpty()
        self._shown = bytearray()
        environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "40"}
        environ.pop("NO_COLOR", None)
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=slave, stdout=slave, stderr=slave, env=environ, preexec_fn=_hear_ctrl_c
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait(self, timeout: float) -> tuple[int, str]:
        """Returns the exit code and everything that was shown, with the terminal's control sequences."""
        try:
            code = self.process.wait(timeout)
        finally:
            self.process.kill()
        self._reader.join(timeout=10)
        return code, self.shown

    @property
    def shown(self) -> str:
        return self._shown.decode(errors="replace")

    def _read(self) -> None:
        while True:
            try:
                found = os.read(self._master, 65536)
            except OSError:  # the last process that held the terminal has ended
                found = b""
            if not found:
                os.close(self._master)
                return
            self._shown += found


def launch(tmp_path: Path, vllm: Vllm, *arguments: str) -> tuple[subprocess.Popen[str], int]:
    """Starts the launcher attached to a running server, with a separate state folder."""
    command, port = launch_command(tmp_path, vllm, *arguments)
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=_hear_ctrl_c
    )
    return process, port


def launch_command(tmp_path: Path, vllm: Vllm, *arguments: str) -> tuple[list[str], int]:
    """Returns the launcher's command line, and the port of its API."""
    state = tmp_path / "state"
    if not state.exists():
        state.mkdir()
        # The launcher's stack and the running server share their folders, as they do by default.
        (state / "models").symlink_to(vllm.models_dir)
        (state / "weights").symlink_to(vllm.weights_dir)
    port = free_port()
    command = [sys.executable, str(SCRIPT), "--state_dir", str(state), "--runs_dir", str(tmp_path / "runs")]
    command += ["--api_port", str(port), "--model_port", vllm.url.rsplit(":", 1)[1], *arguments]
    return command, port


def _hear_ctrl_c() -> None:
    """A shell starts background processes with Ctrl-C ignored, and child processes inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
