"""`gristmill doctor RUN`: the checks of a run's files."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from tests.support.run_folder import CREATED, RunFolderWriter, synthetic_run
from tests.unit.view.recorded import record

from gristmill.archive.run_file import write_run_file
from gristmill.folders import RunFolder
from gristmill.internal.check import Check
from gristmill.internal.lines import read_jsonl
from gristmill.internal.receipts import RECEIPTS_FILE, Receipt, ReceiptState
from gristmill_cli.main import main
from gristmill_view.run_checks import check_files

OK, FAILED, UNPROVEN = ReceiptState.OK, ReceiptState.FAILED, ReceiptState.UNPROVEN


@pytest.fixture
def run(tmp_path: Path) -> RunFolderWriter:
    return synthetic_run(tmp_path, steps=4, groups_per_step=2, group_size=2, tokens=20)


def checks(run: RunFolderWriter) -> dict[str, Check]:
    return {check.name: check for check in check_files(RunFolder.open(run.path))}


def write_receipts(run: RunFolderWriter, states: Sequence[tuple[int, str, ReceiptState]]) -> None:
    """`states`: step, server and state of each receipt."""
    rows = [
        Receipt(
            step=step,
            version=f"1.{step}",
            server=f"http://{server}:9001",
            state=state,
            difference=0.1 if state is FAILED else 1e-7,
            bound=1e-5,
            cause="label_without_weights" if state is FAILED else None,
            detail="remedy" if state is FAILED else "",
        )
        for step, server, state in states
    ]
    (run.path / RECEIPTS_FILE).write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


@pytest.mark.parametrize(
    ("states", "state"),
    [
        ([(0, "a", OK), (1, "a", OK), (1, "b", OK)], "ok"),
        ([], "warning"),
        ([(0, "a", OK), (1, "a", UNPROVEN)], "warning"),
        # Published again, with success.
        ([(0, "a", OK), (1, "a", FAILED), (1, "a", OK)], "warning"),
        # Left out for one version.
        ([(0, "a", OK), (1, "a", FAILED), (1, "a", FAILED), (1, "b", OK), (2, "a", OK), (2, "b", OK)], "warning"),
        ([(0, "a", OK), (1, "a", FAILED), (1, "a", FAILED)], "failed"),
        ([(0, "a", OK), (1, "a", FAILED), (1, "b", OK)], "failed"),
    ],
)
def test_publications_fail_if_the_last_receipt_of_a_server_failed(
    run: RunFolderWriter, states: Sequence[tuple[int, str, ReceiptState]], state: str
) -> None:
    write_receipts(run, states)
    found = checks(run)["publications"]
    assert found.state == state
    assert ("label_without_weights" in found.text) is any(one is FAILED for _, _, one in states)


def test_row_that_is_no_receipt_fails_and_a_torn_row_does_not(run: RunFolderWriter) -> None:
    write_receipts(run, [(0, "a", OK)])
    with (run.path / RECEIPTS_FILE).open("a") as file:
        file.write('{"step": 1, "ver')
    assert checks(run)["publications"].state == "ok"
    (run.path / RECEIPTS_FILE).write_text('{"state": "ok"}\n')
    assert checks(run)["publications"].state == "failed"


def test_missing_steps_fail(run: RunFolderWriter) -> None:
    assert checks(run)["steps"].state == "ok"
    rows = read_jsonl(run.path / "metrics.jsonl")
    run.metrics([row for row in rows if row["step"] != 2])
    assert checks(run)["steps"].state == "failed"
    run.metrics([{**row, "skipped": "nothing is left" if row["step"] == 2 else None} for row in rows])
    assert checks(run)["steps"].state == "warning"
    (run.path / "metrics.jsonl").unlink()
    assert checks(run)["steps"].state == "failed"


@pytest.mark.parametrize(("difference", "state"), [(1e-6, "ok"), (0.2, "failed")])
def test_trainer_and_server_that_disagree_on_the_newest_weights_fail(
    run: RunFolderWriter, difference: float, state: str
) -> None:
    rows = read_jsonl(run.path / "metrics.jsonl")
    run.metrics([{**row, "staleness_mean": 0.0, "rollout_logprob_diff_mean": difference} for row in rows])
    assert checks(run)["log-probabilities"].state == state
    run.metrics([{**row, "staleness_mean": 1.0, "rollout_logprob_diff_mean": difference} for row in rows])
    assert checks(run)["log-probabilities"].state == "ok", "other weights may disagree"


def test_groups_that_are_gone_are_a_warning_and_damaged_groups_a_failure(run: RunFolderWriter) -> None:
    assert {checks(run)[name].state for name in ("archive", "trainer's records")} == {"ok"}
    run.drop("let_go", "g00000000", reason="max_bytes")
    assert checks(run)["archive"].state == "warning"
    segment = run.path / "rollouts" / "000001.gmz"
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 1
    segment.write_bytes(content)
    assert checks(run)["archive"].state == "failed"


@pytest.mark.slow
def test_json_of_the_command_has_every_check(run: RunFolderWriter, capsys: pytest.CaptureFixture[str]) -> None:
    write_receipts(run, [(0, "a", OK), (1, "a", FAILED)])
    assert main(["doctor", str(run.path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert {check["name"] for check in found["checks"]} > set(checks(run))


def test_files_of_an_earlier_run_with_the_same_id_are_not_checked(run: RunFolderWriter) -> None:
    write_receipts(run, [(0, "a", OK), (1, "a", OK)])
    for path in run.path.rglob("*.jsonl"):
        os.utime(path, (1.0, 1.0))
    write_run_file(run.path, record(run_id=run.path.name, created_at=CREATED / 1000 + 5))
    found = checks(run)
    states = {name: found[name].state for name in ("archive", "trainer's records", "steps", "publications")}
    assert states == {
        "archive": "failed", "trainer's records": "warning", "steps": "failed", "publications": "warning",
    }  # fmt: skip
    assert "metrics.jsonl is missing" in found["steps"].text
