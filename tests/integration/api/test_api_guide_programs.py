"""The trainer and the environment at the end of docs/api.md work together, and the trainer survives a kill."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from tests.support.api_server import ApiServer

from gristmill import RunState, SyncClient

GUIDE = Path(__file__).parents[3] / "docs" / "api.md"
RUN, STEPS, GROUPS_PER_STEP = "letters", 3, 2
LONGEST = 30
"""Lines of a program that contain code."""


def _program(title: str) -> str:
    section = GUIDE.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    (program,) = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return str(program)


def _start(program: str, folder: Path, api: ApiServer) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**os.environ, "API": api.url},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _ends(process: subprocess.Popen[str]) -> None:
    try:
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, output


def test_programs_are_the_last_sections_and_short() -> None:
    titles = re.findall(r"^## (.*)$", GUIDE.read_text(), re.MULTILINE)
    assert titles[-2:] == ["A complete trainer", "A complete environment"]
    for title in titles[-2:]:
        assert len([line for line in _program(title).splitlines() if line.strip()]) <= LONGEST


def test_trainer_and_environment_of_the_guide_finish_a_run(
    redis_url: str, shared_api: ApiServer, tmp_path: Path
) -> None:
    with SyncClient(shared_api.url, patience=10) as api:
        # The trainer starts first, and waits for the run. It is killed between its first checkpoint and its last.
        sleeps = "        __import__('time').sleep(600)\n"
        program = _program("A complete trainer").replace("        session.ack()\n", sleeps)
        killed = _start(f"import logging; logging.basicConfig(level='INFO')\n{program}", tmp_path, shared_api)
        assert killed.stdout is not None
        while "waiting up to 600 s" not in (line := killed.stdout.readline()):
            assert line, killed.wait()
        environment = _start(_program("A complete environment"), tmp_path, shared_api)
        while not (tmp_path / "checkpoint.json").exists():
            assert killed.poll() is None, killed.communicate()
            time.sleep(0.05)
        killed.kill()
        killed.communicate()
        covered = json.loads((tmp_path / "checkpoint.json").read_text())["covered"]
        _ends(_start(_program("A complete trainer"), tmp_path, shared_api))
        _ends(environment)
        record, audit = api.get_run(RUN), api.audit(RUN)
        rows = api.metrics(RUN, "trainer")
        assert (record.state, record.version, record.incarnation) == (RunState.FINISHED, f"2.{STEPS}", 2)
        assert len(covered) == GROUPS_PER_STEP
        assert {*covered} <= {*audit.trained}
        assert Counter(audit.trained) == Counter({*audit.trained})
        assert len(audit.trained) == STEPS * GROUPS_PER_STEP
        assert [(row.step, row.values["checkpoint"]) for row in rows] == [(2, "step-2"), (3, "step-3")]
        assert api.environments(RUN) == []
    assert json.loads((tmp_path / "checkpoint.json").read_text())["step"] == STEPS
