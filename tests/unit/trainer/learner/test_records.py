"""The trainer's records of a step: the step's results for each token, and the fate of each sequence."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.trainer.learner.learning import Build, make_samples

from gristmill import PolicyVersion, RunRecord, RunState
from gristmill.archive import segment
from gristmill.archive.trained import NOT_RECORDED, TRAINED, TrainedGroup
from gristmill.internal.archive_writer import RunWriter
from gristmill_trainer.data.samples import Prepared, Statistics
from gristmill_trainer.data.types import Reason, Rejected, Sample
from gristmill_trainer.metrics import StepResult
from gristmill_trainer.records import (
    OVERLONG,
    STEP_SKIPPED,
    UPDATE_LEFT_OUT,
    TrainedRecords,
    trained_groups,
)

VERSION = PolicyVersion(2, 7)
RUN = RunRecord(run_id="test", state=RunState.OPEN, digest="", group_size=2, env={}, created_at=1_790_000_000.123)


def samples(count: int = 8) -> list[Sample]:
    """Of groups of two."""
    return [replace(sample, sequence=number % 2) for number, sample in enumerate(make_samples(count))]


def prepared(of: Sequence[Sample], *rejected: Rejected) -> Prepared:
    return Prepared(list(of), list(rejected), Statistics.of_groups([]))


def records(of: Sequence[Sample], result: StepResult, *rejected: Rejected) -> dict[str, TrainedGroup]:
    """Returns the records by group id, as they are read back."""
    found = trained_groups(VERSION, prepared(of, *rejected), result)
    return {group.group_id: TrainedGroup.decode(group.encode()) for group in found}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"batch_size": 3},
        {"token_budget": 24},
        {"packing": False, "batch_size": 3},
        {"num_epochs": 2, "minibatches": 3, "token_budget": 24},
    ],
    ids=str,
)
def test_records_have_the_log_probabilities_of_the_policy_before_the_step(
    build: Build, settings: dict[str, Any]
) -> None:
    learner, batch = build(**settings), samples()
    before = learner.logprobs(batch)
    found = records(batch, learner.step(batch, 1))
    assert list(found) == ["g0", "g1", "g2", "g3"]
    for sample, old in zip(batch, before, strict=True):
        group = found[sample.group_id]
        assert (group.step, group.version, group.outcome) == (7, "2.7", None)
        sequence = group.sequences[sample.sequence]
        assert sequence.outcome == TRAINED
        np.testing.assert_array_equal(sequence.mask, sample.trained)
        assert sequence.logprobs == pytest.approx(old[sample.trained], abs=1e-5)
        np.testing.assert_array_equal(sequence.token_advantages, sample.advantages[sample.trained])
        assert len(sequence.advantages) == 1
        assert sequence.entropy is not None
        assert (len(sequence.entropy), bool((sequence.entropy > 0).all())) == (sample.trained_tokens, True)


def test_sequences_that_are_not_trained_on_have_their_reason(build: Build) -> None:
    batch = samples()
    batch[1] = replace(batch[1], trained=np.zeros_like(batch[1].trained))
    rejected = (Rejected("g9", None, Reason.STALE, ""), Rejected("g8", 3, Reason.REF_LOGPROBS, ""))
    found = records(batch, build().step(batch, 1), *rejected)
    assert {index: one.outcome for index, one in found["g0"].sequences.items()} == {0: TRAINED, 1: OVERLONG}
    assert (found["g9"].outcome, found["g9"].sequences) == ("stale", {})
    assert found["g8"].sequences[3].outcome == "ref_logprobs"
    assert found["g8"].sequences[3].logprobs is None


def test_step_that_changed_no_weights_is_recorded_as_skipped(build: Build) -> None:
    batch = samples()
    advantages = np.full_like(batch[5].advantages, math.nan)
    broken = [*batch[:5], replace(batch[5], advantages=advantages), *batch[6:]]
    found = records(broken, build().step(broken, 1))
    assert {one.outcome for group in found.values() for one in group.sequences.values()} == {STEP_SKIPPED}


def test_sequences_of_a_skipped_update_are_recorded_with_that_outcome(build: Build) -> None:
    batch = samples()
    advantages = np.full_like(batch[5].advantages, math.nan)
    broken = [*batch[:5], replace(batch[5], advantages=advantages), *batch[6:]]
    found = records(broken, build(minibatches=4).step(broken, 1))
    outcomes = {group.group_id: {one.outcome for one in group.sequences.values()} for group in found.values()}
    assert outcomes == {"g0": {TRAINED}, "g1": {TRAINED}, "g2": {UPDATE_LEFT_OUT}, "g3": {TRAINED}}


def written(folder: Path) -> list[TrainedGroup]:
    found = []
    for path in segment.files(folder):
        with path.open("rb") as file:
            opening = segment.read_opening(file, str(path))
            assert opening is not None
            assert (opening.run_id, opening.created_ms) == ("test", 1_790_000_000_123)
            found += [
                TrainedGroup.decode(segment.parse(frames, head).body)
                for frames, head, _ in segment.read_frames(file, "")
            ]
    return found


def test_thread_writes_every_step_and_copies_the_tokenizer(build: Build, tmp_path: Path) -> None:
    learner, batch = build(), samples()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    with closing(TrainedRecords(tmp_path / "trained", RUN, str(tmp_path / "model"), min_free=0)) as recorded:
        for step in (1, 2):
            recorded.add(PolicyVersion(1, step), prepared(batch), learner.step(batch, step))
    assert [(one.group_id, one.step) for one in written(tmp_path / "trained")] == [
        (f"g{number}", step) for step in (1, 2) for number in range(4)
    ]
    assert (tmp_path / "trained" / "tokenizer" / "tokenizer.json").read_text() == "{}"
    assert (recorded.left_out, recorded.lost) == (0, 0)


def nothing() -> StepResult:
    return StepResult()


def test_full_queue_leaves_out_details_and_keeps_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training does not wait for the disk."""
    disk = threading.Event()
    append = RunWriter.append

    def slow(self: RunWriter, group_id: str, schema: str, stored: bytes) -> None:
        assert disk.wait(60)
        append(self, group_id, schema, stored)

    monkeypatch.setattr(RunWriter, "append", slow)
    batch = samples(2)
    recorded = TrainedRecords(tmp_path / "trained", RUN, min_free=0)
    for step in range(1, 21):
        recorded.add(PolicyVersion(1, step), prepared(batch), nothing())
    assert recorded.left_out >= 10
    disk.set()
    recorded.close()
    found = written(tmp_path / "trained")
    assert {one.step for one in found} == set(range(1, 21))
    assert sum(one.outcome == NOT_RECORDED for one in found) == recorded.left_out


def test_disk_that_fails_is_counted_and_never_raises(tmp_path: Path) -> None:
    (tmp_path / "trained").write_text("a file where the folder should be")
    with closing(TrainedRecords(tmp_path / "trained", RUN, min_free=0)) as recorded:
        recorded.add(PolicyVersion(1, 1), prepared(samples(4)), nothing())
    assert recorded.lost == 2
