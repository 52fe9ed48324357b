"""The records of checkpoints, which stay when a checkpoint is removed."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from tests.support.errors import raises
from tests.unit.trainer.lifecycle.conftest import SETTINGS, progress, start_training

from gristmill_trainer.checkpoint.digests import (
    DIGESTS_FILE,
    DigestWriter,
    TrainerFacts,
    file_digests,
    lineage,
    read_digests,
)
from gristmill_trainer.checkpoint.store import CheckpointStore
from gristmill_trainer.errors import CheckpointError
from gristmill_trainer.learner_factory import LearnerPlan
from gristmill_trainer.policy import ModelSource

FACTS = TrainerFacts.of(
    LearnerPlan(ModelSource.of("model"), None, SETTINGS, 24), torch.device("cpu"), ranks=1, max_staleness=None
)


def write(folder: Path, versions: list[tuple[int, int]], after: str | None) -> None:
    """Appends rows of one trainer, of checkpoints of (incarnation, step)."""
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").write_text('{"files": {}}')
    with contextlib.closing(DigestWriter(folder, FACTS, 1.5, after)) as digests:
        for incarnation, step in versions:
            digests.trained(step, [f"g{step}"])
            digests.append(folder, progress(step, incarnation))


def test_every_checkpoint_has_a_row_although_old_checkpoints_are_removed(model_dir: Path, tmp_path: Path) -> None:
    training = start_training(ModelSource.of(str(model_dir)), None)
    store = CheckpointStore(tmp_path / "checkpoints", kept=1)
    with contextlib.closing(DigestWriter(tmp_path, FACTS, 1.5, None)) as digests:
        for step in (1, 2):
            training.step(step)
            digests.trained(step, [f"g{step}"])
            path = store.save(training.state, progress(step), digests).path
    first, second = read_digests(tmp_path / DIGESTS_FILE)
    assert (first.batches, second.batches, second.after, second.created_ms) == ({1: ["g1"]}, {2: ["g2"]}, "1.1", 1500)
    assert first.files["model.safetensors"] != second.files["model.safetensors"]
    assert second.files == file_digests(path)
    assert second.trainer == FACTS


def test_lineage_leaves_out_checkpoints_that_no_trainer_continued_from(tmp_path: Path) -> None:
    write(tmp_path, [(1, 2), (1, 4), (1, 6)], None)
    write(tmp_path, [(2, 6), (2, 8)], "1.4")
    found = lineage(read_digests(tmp_path / DIGESTS_FILE))
    assert [one.version for one in found] == ["1.2", "1.4", "2.6", "2.8"]


def test_row_of_a_replaced_trainer_does_not_end_the_lineage(tmp_path: Path) -> None:
    write(tmp_path, [(1, 2)], None)
    write(tmp_path, [(2, 4)], "1.2")
    write(tmp_path, [(1, 4)], "1.2")
    assert [one.version for one in lineage(read_digests(tmp_path / DIGESTS_FILE))] == ["1.2", "2.4"]


def test_lineage_without_one_of_its_rows_is_refused(tmp_path: Path) -> None:
    """A later trainer rewrites the file without a damaged row."""
    write(tmp_path, [(1, 2), (1, 4), (1, 6)], None)
    rows = read_digests(tmp_path / DIGESTS_FILE)
    for missing in (0, 1):
        with raises(CheckpointError, "digests_unreadable"):
            lineage([*rows[:missing], *rows[missing + 1 :]])


def test_checkpoint_that_is_written_twice_has_one_row(tmp_path: Path) -> None:
    write(tmp_path, [(1, 2), (1, 2)], None)
    assert [one.version for one in read_digests(tmp_path / DIGESTS_FILE)] == ["1.2"]


@pytest.mark.parametrize("row", [b'{"step": 1}', b'{"progress": {"step": 1, "last_batch": "\xff"}}'])
def test_rows_of_another_format_are_refused(tmp_path: Path, row: bytes) -> None:
    (tmp_path / DIGESTS_FILE).write_bytes(row + b"\n")
    with raises(CheckpointError, "digests_unreadable", path=tmp_path / DIGESTS_FILE):
        read_digests(tmp_path / DIGESTS_FILE)
