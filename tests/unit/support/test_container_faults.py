"""The faults of tests/e2e/test_resilience.py do what they say, on plain processes and without a container."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.container_faults import CLOCK_STEP_S, Clocks, Disk, state, stopped

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the faults are faults of Linux containers")

CLOCKS = """
import sys, time
for _ in sys.stdin:
    print(time.time() - time.monotonic(), flush=True)
"""
CHILD = "import time; print(1, flush=True); time.sleep(60)"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{CHILD}'])"


@pytest.mark.slow
def test_clock_steps_in_a_running_process_without_the_monotonic_clock(tmp_path: Path) -> None:
    clocks = Clocks(tmp_path / "clock", ["redis", "api"])
    environ = {**os.environ, **clocks.environment("api", str(tmp_path / "clock"))}
    command = [sys.executable, "-c", CLOCKS]
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        seen = []
        for service, seconds in (
            ("api", 0),
            ("api", CLOCK_STEP_S),
            ("redis", CLOCK_STEP_S),
            ("api", -2 * CLOCK_STEP_S),
        ):
            clocks.step(service, seconds)
            process.stdin.write("\n")
            process.stdin.flush()
            seen.append(float(process.stdout.readline()))
        process.stdin.close()
    steps = [round((now - seen[0]) / CLOCK_STEP_S, 1) for now in seen]
    assert steps == [0, 1, 1, -1]


def test_stopped_process_and_its_child_stand_still_and_continue() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        with stopped(process.pid):
            assert [state(pid) for pid in (process.pid, int(child))] == ["T", "T"]
        assert "T" not in [state(pid) for pid in (process.pid, int(child))]
        os.kill(int(child), 9)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a file system")
def test_full_disk_takes_no_byte_until_it_is_emptied(tmp_path: Path) -> None:
    with Disk(tmp_path / "disk") as disk:
        file = disk.folder / "runs" / "file"
        file.write_bytes(b"1" * 10_000)
        disk.fill()
        with pytest.raises(OSError) as full:
            (disk.folder / "weights" / "file").write_bytes(b"1" * 10_000)
        assert full.value.errno == errno.ENOSPC
        assert len(file.read_bytes()) == 10_000
        disk.empty()
        (disk.folder / "weights" / "file").write_bytes(b"1" * 10_000)
    assert not any(disk.folder.iterdir())
