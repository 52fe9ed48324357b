"""Batches without a finite gradient are kept, and too many in a row end the training."""

from __future__ import annotations

from pathlib import Path

from tests.support.errors import raises
from tests.support.groups import make_group

from gristmill_trainer.errors import TrainerError
from gristmill_trainer.quarantine import SkippedSteps, SkipRecord, quarantine, read_quarantine

REASON = SkipRecord(
    step=12, version="1.11", problem="the loss is nan", loss="nan", grad_norm="inf", group_ids=["g00000001"]
)


def test_quarantined_batch_is_read_back(tmp_path: Path) -> None:
    groups = [make_group("g00000001", seed=1), make_group("g00000002", seed=2)]
    files = [quarantine(tmp_path / "aside", groups, REASON) for _ in range(2)]
    assert [file.name for file in files] == ["step-000012.1.groups", "step-000012.2.groups"]
    for file in files:
        found, reason = read_quarantine(file)
        assert [group.encode() for group in found] == [group.encode() for group in groups]
        assert reason == REASON


def test_too_many_skipped_steps_name_the_files_and_the_remedy() -> None:
    skipped = SkippedSteps(allowed=2)
    for name in ("a", "b"):
        skipped.skipped(Path(name), "the loss is nan")
    skipped.trained()
    for name in ("c", "d"):
        skipped.skipped(Path(name), "the loss is nan")
    skipped.raise_if_too_many()
    skipped.skipped(Path("e"), "the norm is inf")
    with raises(TrainerError, "too_many_skipped_steps", files=["c", "d", "e"]) as raised:
        skipped.raise_if_too_many()
    assert "--resume PATH" in str(raised.value)
