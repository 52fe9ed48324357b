"""Runs the store's tests against a folder of Lua scripts, in a separate process that a mutant cannot harm."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

import pytest
from tests.support import redis_server
from tests.support.api_process import SCRIPTS

from gristmill_api.store import scripts

ROOT: Final = Path(__file__).resolve().parents[2]
_REDIS_MEMORY: Final = 1 << 30
# Plain asserts: no person reads the failures, and rewriting the asserts takes longer than many tests.
_OPTIONS: Final = ["-x", "-q", "--no-header", "--tb=line", "--assert=plain", "-p", "no:schemathesis"]

CONTEXT: Final = multiprocessing.get_context("forkserver")
# Imported once; each trial is a fork of this process.
CONTEXT.set_forkserver_preload([__name__, "tests.integration.api.test_machine", "tests.integration.api.conftest"])


class Verdict(StrEnum):
    KILLED = "killed"
    TIMED_OUT = "timed out"
    """A script or a test did not end, so the mutant counts as found."""
    SURVIVED = "survived"


@dataclass(frozen=True)
class Trial:
    folder: Path
    """The folder, which holds lua/*.lua."""
    tests: tuple[str, ...]
    time_limit: float

    def run(self) -> tuple[Verdict, str]:
        """Returns the verdict and pytest's output. Raises RuntimeError if the tests cannot run at all."""
        # In memory if the machine has such a place, because a mutant's Redis need not wait for a disk.
        memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        with tempfile.TemporaryDirectory(prefix="gristmill-trial-", dir=memory) as scratch:
            process = CONTEXT.Process(target=_run, args=(self.folder, self.tests, Path(scratch)))
            process.start()
            process.join(self.time_limit)
            if process.exitcode is None:
                # The child leads a separate process group, which includes its redis-server.
                os.killpg(process.pid or 0, signal.SIGKILL)
                process.join()
                return Verdict.TIMED_OUT, ""
            output, code = (Path(scratch) / "output").read_text(), Path(scratch) / "code"
            # Not the exit code of the process: another thread that starts a trial may read it first (`_cleanup` of
            # multiprocessing), and this thread would get 255.
            ended = int(code.read_text()) if code.exists() else None
            if ended == pytest.ExitCode.OK:
                return Verdict.SURVIVED, output
            if ended == pytest.ExitCode.TESTS_FAILED:
                return Verdict.KILLED, output
            raise RuntimeError(f"pytest ended with {ended}:\n{output[-4000:]}")


def _run(folder: Path, tests: tuple[str, ...], scratch: Path) -> None:
    os.setsid()
    with (scratch / "output").open("w") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    os.chdir(ROOT)
    tempfile.tempdir = str(scratch)
    redis_server.MEMORY = _REDIS_MEMORY
    with scripts_from(folder):
        code = pytest.main([*_OPTIONS, *tests])
    (scratch / "code").write_text(str(int(code)))


@contextlib.contextmanager
def scripts_from(folder: Path) -> Iterator[None]:
    """Makes the store read its scripts from folder/lua, and not from its package, here and in every ApiServer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vars(scripts), "files", lambda package: folder)
        patch.setenv(SCRIPTS, str(folder))
        yield
