"""The flag --resume with auto, with never, or with the folder of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.errors import raises
from tests.unit.trainer.lifecycle.conftest import Training, progress, start_training

from gristmill_trainer.checkpoint.store import CheckpointStore, find_resumption
from gristmill_trainer.errors import CheckpointError


@pytest.fixture
def store(training: Training, tmp_path: Path) -> CheckpointStore:
    store = CheckpointStore(tmp_path / "run" / "checkpoints", kept=5)
    for step in (2, 4):
        training.step(step)
        store.save(training.state, progress(step, covered=[f"g{step}"]))
    return store


def test_resume_auto_finds_the_newest_checkpoint_or_none(store: CheckpointStore, tmp_path: Path) -> None:
    found = find_resumption(store, "auto")
    assert (found.step, found.covered, found.origin) == (4, ["g4"], None)
    assert find_resumption(CheckpointStore(tmp_path / "other", kept=2), "auto").checkpoint is None


def test_resume_never_with_checkpoints_fails_with_the_remedy(store: CheckpointStore, tmp_path: Path) -> None:
    with raises(CheckpointError, "checkpoints_exist", newest=store.folder / "step-000004"):
        find_resumption(store, "never")
    assert find_resumption(CheckpointStore(tmp_path / "other", kept=2), "never").checkpoint is None


def test_resume_from_a_folder_of_this_run_settles_its_groups(store: CheckpointStore) -> None:
    found = find_resumption(store, str(store.folder / "step-000002"))
    assert (found.step, found.covered, found.own) == (2, ["g2"], True)


def test_resume_from_another_run_loads_only_its_weights(store: CheckpointStore, tmp_path: Path) -> None:
    found = find_resumption(CheckpointStore(tmp_path / "other", kept=2), str(store.folder / "step-000004"))
    assert (found.step, found.covered, found.own) == (0, [], False)


def test_resumed_optimizer_keeps_its_own_settings(store: CheckpointStore, training: Training) -> None:
    checkpoint = store.load(store.folder / "step-000004")
    resumed = start_training(training.policy.source, str(checkpoint.path))
    resumed.learner.optimizer.param_groups[0].update(betas=(0.5, 0.6))
    store.restore(checkpoint, resumed.state)
    found = resumed.learner.optimizer.state_dict()
    assert found["param_groups"][0]["betas"] == (0.5, 0.6)
    assert len(found["state"]) > 0


def test_resume_with_the_same_folder_continues_from_the_newest_checkpoint(
    store: CheckpointStore, training: Training
) -> None:
    """A container is started again with the same command; the trainer must not lose its work since then."""
    named = str(store.folder / "step-000002")
    store.save(training.state, progress(3, 2, origin=named))
    found = find_resumption(store, named)
    assert (found.step, found.origin) == (3, named)


def test_resume_works_after_the_named_folder_was_pruned(store: CheckpointStore, training: Training) -> None:
    named = store.folder / "step-000002"
    keeps_one = CheckpointStore(store.folder, kept=1)
    keeps_one.save(training.state, progress(3, 2, origin=str(named)))
    assert not named.exists()
    found = find_resumption(keeps_one, str(named))
    assert (found.step, found.own, found.origin) == (3, True, str(named))


def test_resume_recognizes_a_folder_of_this_run_under_any_name(store: CheckpointStore, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(store.folder)
    for named in (tmp_path / "link" / "step-000002", store.folder / ".." / store.folder.name / "step-000002"):
        for same in (store, CheckpointStore(tmp_path / "link", kept=3)):
            found = find_resumption(same, str(named))
            assert (found.own, found.step) == (True, 2)


def test_resume_from_a_named_checkpoint_skips_a_broken_newest(store: CheckpointStore) -> None:
    """Follows the advice of the error about the broken checkpoint."""
    (store.folder / "step-000004" / "optimizer.pt").unlink()
    found = find_resumption(store, str(store.folder / "step-000002"))
    assert found.step == 2


def test_resume_from_an_unknown_name_lists_the_checkpoints(store: CheckpointStore) -> None:
    known = [store.folder / "step-000002", store.folder / "step-000004"]
    with raises(CheckpointError, "checkpoint_missing", resume="latest", known=known):
        find_resumption(store, "latest")


@pytest.mark.parametrize("creation", ["old", ""], ids=["earlier run", "no creation recorded"])
@pytest.mark.parametrize("resume", ["auto", "never"])
def test_resume_refuses_checkpoints_of_an_earlier_run_of_the_id(
    training: Training, tmp_path: Path, creation: str, resume: str
) -> None:
    earlier = CheckpointStore(tmp_path, kept=2)
    newest = earlier.save(training.state, progress(4, 3, covered=["g4"], creation=creation)).path
    code, value = ("checkpoint_of_earlier_run", "path") if resume == "auto" else ("checkpoints_exist", "newest")
    with raises(CheckpointError, code, **{value: newest}) as raised:
        find_resumption(CheckpointStore(tmp_path, kept=2, creation="new"), resume)
    assert f"--resume {newest}" in str(raised.value), "--resume auto would fail"


@pytest.mark.parametrize("creation", ["old", ""], ids=["earlier run", "no creation recorded"])
def test_resume_from_a_named_earlier_run_loads_only_its_weights(
    training: Training, tmp_path: Path, creation: str
) -> None:
    earlier = CheckpointStore(tmp_path, kept=2)
    named = str(earlier.save(training.state, progress(4, 3, covered=["g4"], creation=creation)).path)
    store = CheckpointStore(tmp_path, kept=1, creation="new")
    found = find_resumption(store, named)
    assert (found.step, found.covered, found.own, found.origin) == (0, [], False, named)

    # Started again, the trainer continues from its own checkpoint, although the earlier run's has a higher version.
    for step in (2, 4):
        store.save(training.state, progress(step, 1, [f"g{step}"], origin=named, creation="new"))
    for resume in (named, "auto"):
        again = find_resumption(CheckpointStore(tmp_path, kept=1, creation="new"), resume)
        assert again.checkpoint is not None
        assert (again.step, again.covered, again.own, again.checkpoint.path.name) == (4, ["g4"], True, "step-000004")
    # The named checkpoint stays, under another name if this run has reached the same step.
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {"step-000004", f"step-000004-of-{creation or 'unknown'}"}
