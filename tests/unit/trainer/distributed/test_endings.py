"""However a training of two ranks ends, no rank hangs, and the files and the exit codes are right for a restart."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from tests.support.ports import free_port
from tests.unit.trainer.distributed.endings import LONG, RUN, SCENARIOS, TIMEOUT

from gristmill.internal.lines import read_jsonl
from gristmill_trainer.out_of_memory import FILE
from gristmill_trainer.quarantine import read_quarantine

pytestmark = pytest.mark.long


@dataclass(frozen=True)
class Ending:
    """The exit codes of the ranks, and the state after a training."""

    codes: list[str]
    """Exit codes, or "hangs"."""
    reports: list[list[str]]
    """Codes of the reported errors."""
    checkpoints: list[str]
    acked: int = 0
    """Number of groups, two per step."""
    leased: int = 0
    """Number of batches that stay leased."""


LOST = ["rank_lost"]
ENDINGS = {
    "stopped": Ending(["143", "143"], [["stopped"], ["stopped"]], ["step-000002"], acked=4),
    "stopped before a run": Ending(["143", "143"], [["stopped"], ["stopped"]], []),
    "abandoned": Ending(["143", "143"], [["stopped"], ["stopped"]], ["step-000002"], acked=4),
    "too many skipped": Ending(["1", "1"], [["too_many_skipped_steps"], LOST], ["step-000002"], acked=4),
    # The leases expire, or belong to the other trainer.
    "fenced lease": Ending(["0", "0"], [["fenced"], ["fenced"]], [], leased=2),
    "fenced ack": Ending(["0", "0"], [["fenced"], ["fenced"]], ["step-000002"], leased=2),
    "fenced checkpoint": Ending(["0", "0"], [["fenced"], ["fenced"]], ["step-000002"], leased=2),
    # The checkpoint covers the leased groups; the next trainer settles them.
    "suspended": Ending(["1", "1"], [["suspended"], ["suspended"]], ["step-000002"], leased=2),
    # The environment changes the run while the trainer loads the model.
    "extended before the take": Ending(["0", "0"], [[], []], ["step-000004"], acked=8),
    "suspended before the take": Ending(["0", "0"], [[], []], ["step-000004"], acked=8),
    "error": Ending(["1", "1"], [["run_missing"], LOST], [], leased=2),
    "full disk, model": Ending(["1", "1"], [["write_failed"], LOST], [], leased=2),
    "full disk, optimizer": Ending(["1", "1"], [["write_failed"], LOST], [], leased=2),
    "full disk, export": Ending(["1", "1"], [["write_failed"], LOST], ["step-000004"], acked=8),
    "rank 0 killed": Ending(["-9", "1"], [[], LOST], []),
    "rank 1 killed": Ending(["1", "-9"], [LOST, []], [], leased=3),
    "rank 1 out of memory": Ending(["1", "1"], [LOST, ["rank_out_of_memory"]], [], leased=1),
}


@pytest.fixture(scope="module")
def folder(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which two processes have run all scenarios."""
    folder = tmp_path_factory.mktemp("endings")
    ports = ",".join(str(free_port()) for _ in SCENARIOS)
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        **{f"GRISTMILL_{name}_DIR": str(folder / name.lower()) for name in ("CONFIG", "MODELS", "WEIGHTS")},
    }
    command = [sys.executable, "-m", "tests.unit.trainer.distributed.endings", str(folder), str(model_dir), ports]
    ranks = [
        subprocess.Popen(command, env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)
    ]
    for process in ranks:
        process.wait(timeout=TIMEOUT * len(SCENARIOS))
    return folder


def test_rank_1_ends_after_rank_0_has_closed_its_connections(folder: Path) -> None:
    """torchrun kills rank 0 as soon as rank 1 has ended with an exit code above 0."""
    first = ("rank 1 killed", "rank 1 out of memory")
    ended = [name for name in SCENARIOS if name not in first and (folder / name / "closed").exists()]
    assert len(ended) == len(SCENARIOS) - 3, "all but these and a killed rank 0"
    for name in ended:
        closed, code = ((folder / name / file).stat().st_mtime for file in ("closed", "rank1.code"))
        assert closed <= code, name


@pytest.mark.parametrize("name", SCENARIOS)
def test_both_ranks_end_and_leave_what_a_restart_needs(folder: Path, name: str) -> None:
    here = folder / name
    codes, logs = ([(here / f"rank{rank}.{kind}").read_text() for rank in range(2)] for kind in ("code", "log"))
    api = {"acked": 0, "leased": 0}
    if (here / "api.json").exists():  # A killed rank 0 leaves none.
        api = json.loads((here / "api.json").read_text())
    checkpoints = sorted(path.name for path in (here / "runs" / RUN / "checkpoints").glob("*"))
    reports = [re.findall(r"^\S+ \S+ +(?:ERROR|INFO) +\[(\w+)\]", log, re.MULTILINE) for log in logs]
    assert Ending(codes, reports, checkpoints, **api) == ENDINGS[name], "\n".join(logs)


def test_training_that_runs_out_of_memory_on_one_rank_continues_with_smaller_micro_batches(
    model_dir: Path, tmp_path: Path
) -> None:
    """Start 1 finds the token budget in step 1, start 2 the sequence of step 2 that does not fit alone."""
    scenario = ["-m", "tests.unit.trainer.distributed.endings", str(tmp_path), str(model_dir), "continued"]
    ranks = ["--nnodes", "1", "--master-addr", "127.0.0.1", "--nproc-per-node", "2", *scenario]
    runs = tmp_path / "runs"
    program = (
        f"from pathlib import Path\nfrom gristmill_trainer.per_gpu import torchrun\ntorchrun({ranks}, Path('{runs}'))"
    )
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        **{f"GRISTMILL_{name}_DIR": str(tmp_path / name.lower()) for name in ("CONFIG", "MODELS", "WEIGHTS")},
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False, timeout=240
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0, log
    assert log.count("[rank_out_of_memory]") == 2
    run = runs / RUN
    limits = msgspec.json.decode((run / FILE).read_bytes())["limits"]
    assert limits == {"token_budget": 9, "too_long": LONG, "too_long_to_score": None}, (
        "9 tokens are the longest sequence of step 1"
    )
    assert [row["step"] for row in read_jsonl(run / "metrics.jsonl")] == [1, 2, 3, 4]
    _, skipped = read_quarantine(run / "aside" / "step-000002.1.groups")
    assert f"whose longest sequence has {LONG}" in skipped.problem
    assert [path.name for path in (run / "aside").glob("*.json")] == ["step-000002.1.json"]
    assert len((tmp_path / "acked").read_text().split()) == 8
