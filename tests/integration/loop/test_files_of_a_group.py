"""docs/reliability.md lists the files whose code runs for one group. The lists equal a trace of a real run.

The run also shows the output of all services."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.launcher import launch
from tests.support.stack import ROOT, Vllm

from gristmill import read_rollouts
from gristmill.internal.lines import read_jsonl

pytestmark = pytest.mark.long
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
        "gristmill_trainer/learner.py:Learner.step",
        "gristmill_trainer/training.py:Ledger.trained",
        "gristmill_trainer/publish/publisher.py:Publisher.publish",
    ],
}
"""The headings in docs/reliability.md, and the functions that begin the work on a group."""


def listed(heading: str) -> dict[str, str]:
    """Returns the files under a heading of docs/reliability.md with their purposes."""
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    section = text.split(f"### {heading}\n", 1)[1].split("\n#", 1)[0]
    return dict(re.findall(r"^\| `(\S+)` \| (.+) \|$", section, re.MULTILINE))


@dataclass(frozen=True)
class Traced:
    """A finished run of three steps."""

    files: dict[str, set[str]]
    """By the package of the process that ran them."""
    output: str
    folder: Path
    model_url: str


@pytest.fixture(scope="module")
def traced(vllm: Vllm, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    folder = tmp_path_factory.mktemp("trace")
    entries = [name for names in PATHS.values() for name in names]
    spans = [name for name in entries if name.startswith("gristmill_trainer/")]
    plan = {"folder": str(folder), "tasks": sorted(set(entries) - set(spans)), "spans": spans}
    environ = {"GRISTMILL_TRACE": json.dumps(plan)}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests/support/file_trace"), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        process, _ = launch(folder, vllm, "--training_steps", "3", "--verbose")
    output, _ = process.communicate(timeout=480)
    assert process.returncode == 0, output
    found: dict[str, set[str]] = {}
    for file in folder.glob("*.txt"):
        lines = set(file.read_text().splitlines())
        owner = next(line.split("/")[0] for line in sorted(lines) if not line.startswith("gristmill/"))
        found.setdefault(owner, set()).update(lines)
    return Traced(found, output, folder / "runs" / "quickstart", vllm.url)


@pytest.mark.parametrize("heading", PATHS)
def test_documented_file_lists_match_the_trace_of_a_run(heading: str, traced: Traced) -> None:
    package = PATHS[heading][0].split("/")[0]
    files = listed(heading)
    conditional = {file for file, purpose in files.items() if purpose.startswith("If ")}
    ran = traced.files[package] | conditional
    assert ran == files.keys(), f"not listed: {ran - files.keys()}; listed and did not run: {files.keys() - ran}"


def test_launcher_shows_the_output_of_every_service_that_it_starts(traced: Traced) -> None:
    assert traced.model_url in traced.output, "it says which model server it uses"
    lines = traced.output.splitlines()
    assert not any(text.startswith(f"{'model':<7} | ") for text in lines), "it starts no other one"
    for name in ("redis", "api", "env", "trainer"):
        assert any(text.startswith(f"{name:<7} | ") for text in lines), f"no line of {name}"
    assert [row["step"] for row in read_jsonl(traced.folder / "metrics.jsonl")] == [1, 2, 3]
    assert (traced.folder / "model/tokenizer_config.json").exists()
    assert len(list(read_rollouts(traced.folder))) == 3 * 16, "every group of the three steps is archived"
