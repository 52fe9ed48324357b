"""docs/architecture.md lists the files whose code runs for one group. The lists equal a trace of a real run."""

from __future__ import annotations

import json
import os
import re

import pytest
from tests.support.launcher import launch
from tests.support.stack import ROOT, Vllm

PATHS = {
    "From a row to a submitted group": ["gristmill_env/serve.py:ServeLoop._row"],
    "From a submit to the archive": [
        "gristmill_api/routes/groups.py:submit",
        "gristmill_api/routes/lease.py:lease",
        "gristmill_api/routes/lease.py:ack",
        "gristmill_api/archive/archiver.py:Archiver._write",
    ],
    "From a lease to published weights": [
        "gristmill_trainer/loop.py:wait_for_batch",
        "gristmill_trainer/batch_source.py:Batch.prepared",
        "gristmill_trainer/loop.py:optimizer_step",
        "gristmill_trainer/loop.py:record_outcome",
        "gristmill_trainer/publish/publisher.py:Publisher.publish",
    ],
}
"""The headings in docs/architecture.md, and the functions that begin the work on a group."""


def listed(heading: str) -> dict[str, str]:
    """Returns the files under a heading of docs/architecture.md with their purposes."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.split(f"### {heading}\n", 1)[1].split("\n#", 1)[0]
    return dict(re.findall(r"^\| `(\S+)` \| (.+) \|$", section, re.MULTILINE))


@pytest.fixture(scope="module")
def traced(vllm: Vllm, tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The files by the package of the process that ran them."""
    folder = tmp_path_factory.mktemp("trace")
    entries = [name for names in PATHS.values() for name in names]
    spans = [name for name in entries if name.startswith("gristmill_trainer/")]
    plan = {"folder": str(folder), "tasks": sorted(set(entries) - set(spans)), "spans": spans}
    environ = {"GRISTMILL_TRACE": json.dumps(plan)}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests/support/file_trace"), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        process, _ = launch(folder, vllm, "--training_steps", "3")
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    found: dict[str, set[str]] = {}
    for file in folder.glob("*.txt"):
        lines = set(file.read_text().splitlines())
        owner = next(line.split("/")[0] for line in sorted(lines) if not line.startswith("gristmill/"))
        found.setdefault(owner, set()).update(lines)
    return found


@pytest.mark.parametrize("heading", PATHS)
def test_documented_file_lists_match_the_trace_of_a_run(heading: str, traced: dict[str, set[str]]) -> None:
    package = PATHS[heading][0].split("/")[0]
    files = listed(heading)
    conditional = {file for file, purpose in files.items() if purpose.startswith("If ")}
    assert sorted(traced[package] | conditional) == sorted(files)
