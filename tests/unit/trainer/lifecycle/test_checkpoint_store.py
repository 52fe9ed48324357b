"""A checkpoint is complete or does not exist, is checked before use, and the last checkpoints are kept."""

from __future__ import annotations

import os
import resource
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.errors import raises
from tests.unit.trainer.lifecycle.conftest import Training, progress

from gristmill_trainer.checkpoint.digests import read_digests
from gristmill_trainer.checkpoint.store import CheckpointStore, find_resumption, read_progress
from gristmill_trainer.errors import CheckpointError, FencedError
from gristmill_trainer.model_state import SavedState


def test_checkpoint_contents_are_read_back(training: Training, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, kept=2)
    written = progress(3, 2, ["g00000001"], origin="/elsewhere/step-000001")
    path = store.save(training.state, written).path
    assert CheckpointStore(tmp_path, kept=2).load(path).progress == written


def test_checkpoint_store_keeps_the_last_by_version_not_by_step(training: Training, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, kept=2)
    for step, incarnation in ((5, 1), (10, 1), (20, 1), (15, 2)):
        store.save(training.state, progress(step, incarnation))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000015", "step-000020"]
    assert store.newest() == tmp_path / "step-000015"
    store.save(training.state, progress(20, 2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000015", "step-000020"]
    newest = store.newest()
    assert newest is not None
    assert store.load(newest).progress.version.incarnation == 2


@pytest.mark.parametrize(("size", "file"), [(4, "model"), (4096, "model"), (30_000, "model"), (4, "optimizer.pt")])
def test_checkpoint_without_disk_space_leaves_the_previous_checkpoint(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, file: str
) -> None:
    """As on a full disk: no process may write a file larger than this many bytes. `file`: the first that is larger."""
    store = CheckpointStore(tmp_path, kept=2)
    store.save(training.state, progress(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with (
            raises(CheckpointError, "write_failed", path=tmp_path / "step-000002") as raised,
            monkeypatch.context() as patch,
        ):
            if file != "model":
                patch.setattr(type(training.state), "save_model", lambda state, folder: None)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
            store.save(training.state, progress(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large" in str(raised.value), "the system's reason"
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    store.save(training.state, progress(2))
    assert store.newest() == tmp_path / "step-000002"


def test_replaced_trainer_does_not_overwrite_its_successors_checkpoint(training: Training, tmp_path: Path) -> None:
    old = CheckpointStore(tmp_path, kept=2)
    successors = CheckpointStore(tmp_path, kept=2).save(training.state, progress(5, 2))
    with raises(FencedError, "fenced", path=tmp_path / "step-000005", found="2.5", version="1.5"):
        old.save(training.state, progress(5, 1))
    assert old.load(successors.path).progress.version.incarnation == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-000005"]


class _Held:
    """A state whose writer waits after the model's files until `go` is set."""

    def __init__(self, state: SavedState) -> None:
        self.dist = state.dist
        self.state = state.state
        self._save_model = state.save_model
        self.written, self.go = threading.Event(), threading.Event()

    def save_model(self, folder: Path) -> None:
        self._save_model(folder)
        self.written.set()
        assert self.go.wait(60)


def cleaned(folder: Path, kept: int) -> CheckpointStore:
    """Returns the store of a trainer that has taken the run."""
    store = CheckpointStore(folder, kept)
    store.clean()
    return store


def test_paused_trainer_leaves_the_checkpoint_that_its_successor_writes(training: Training, tmp_path: Path) -> None:
    """Both write the same step: the old trainer was paused within its checkpoint."""
    paused, successor = _Held(training.state), _Held(training.state)
    with ThreadPoolExecutor(2) as pool:
        ended = pool.submit(CheckpointStore(tmp_path, kept=2).save, paused, progress(5, 1))
        assert paused.written.wait(60)
        successors = cleaned(tmp_path, kept=2)
        written = pool.submit(successors.save, successor, progress(5, 2))
        assert successor.written.wait(60)
        paused.go.set()
        assert isinstance(ended.exception(60), OSError | CheckpointError), "its files were cleared away"
        successor.go.set()
        path = written.result(60).path
    assert CheckpointStore(tmp_path, kept=2).load(path).progress.version.incarnation == 2
    assert [one.name for one in tmp_path.iterdir()] == ["step-000005"]


def test_checkpoint_store_removes_partial_checkpoints_of_a_kill(training: Training, tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path, kept=2).save(training.state, progress(1)).path
    (tmp_path / ".step-000002.partial").mkdir()
    (tmp_path / ".step-000000.removed").mkdir()
    path.rename(tmp_path / ".step-000001.replaced")
    resumption = find_resumption(cleaned(tmp_path, kept=2), "auto")
    assert resumption.step == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_second_store_leaves_the_checkpoint_that_is_being_written(training: Training, tmp_path: Path) -> None:
    """A trainer that starts opens the store before it has the run."""
    first, second = _Held(training.state), CheckpointStore(tmp_path, kept=2)
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(second.save, first, progress(1))
        assert first.written.wait(60)
        assert find_resumption(CheckpointStore(tmp_path, kept=2), "auto").step == 0
        first.go.set()
        assert written.result(60).step == 1


def test_checkpoint_may_be_a_link_to_another_disk(training: Training, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run", kept=1)
    path = store.save(training.state, progress(2)).path
    moved = path.rename(tmp_path / "elsewhere")
    path.symlink_to(moved)
    for resume in ("auto", str(path)):
        found = find_resumption(store, resume)
        assert (found.own, found.step) == (True, 2)
    store.save(training.state, progress(4))
    assert [path.name for path in store.folder.iterdir()] == ["step-000004"]
    assert (moved / "model.safetensors").exists(), "the user's folder stays"
    (store.folder / ".step-000003.removed").symlink_to(moved)
    assert find_resumption(cleaned(store.folder, kept=1), "auto").step == 4
    assert not (store.folder / ".step-000003.removed").is_symlink()


def test_other_files_beside_the_checkpoints_are_ignored(training: Training, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, kept=1)
    path = store.save(training.state, progress(2)).path
    (tmp_path / "step-000002.tar.gz").touch()
    shutil.copytree(path, tmp_path / "step-000002-best")
    assert find_resumption(store, "auto").step == 2
    store.save(training.state, progress(4))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-000002-best", "step-000002.tar.gz", "step-000004"]


def test_checkpoint_store_recovers_from_a_kill_during_pruning(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(path: Path, **_: object) -> None:
        if path.name.startswith(".step-000001"):
            (path / "trainer_state.json").unlink()
            raise KeyboardInterrupt

    store = CheckpointStore(tmp_path, kept=1)
    store.save(training.state, progress(1))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            store.save(training.state, progress(2))
    resumption = find_resumption(cleaned(tmp_path, kept=1), "auto")
    assert resumption.step == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


def test_checkpoint_without_a_version_does_not_end_a_training(training: Training, tmp_path: Path) -> None:
    """A checkpoint without a version also does not block a named checkpoint, or a new checkpoint of its step."""
    store = CheckpointStore(tmp_path, kept=2)
    for step in (1, 2):
        store.save(training.state, progress(step))
    (tmp_path / "step-000002" / "trainer_state.json").unlink()
    resumption = find_resumption(store, str(tmp_path / "step-000001"))
    assert resumption.step == 1
    store.save(training.state, progress(3))
    store.save(training.state, progress(2, 2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003"]
    assert store.newest() == tmp_path / "step-000002"


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("model.safetensors", b"", "checkpoint_damaged"),
        ("optimizer.pt", b"", "checkpoint_damaged"),
        ("config.json", b"", "checkpoint_damaged"),
        ("trainer_state.json", b"elsewhere", "checkpoint_unreadable"),
        ("manifest.json", b"config.json", "checkpoint_unreadable"),
    ],
)
def test_checkpoint_with_a_flipped_bit_is_refused_by_name(
    training: Training, tmp_path: Path, name: str, text: bytes, code: str
) -> None:
    """The bit is in the middle, or at the beginning of `text`, which is then not valid UTF-8."""
    store = CheckpointStore(tmp_path, kept=2)
    for step in (1, 2):
        file = store.save(training.state, progress(step, origin="/elsewhere/step-000001")).path / name
    body = bytearray(file.read_bytes())
    body[body.index(text) if text else len(body) // 2] ^= 0x80
    file.write_bytes(body)
    with raises(CheckpointError, code, path=file) as raised:
        find_resumption(store, "auto")
    assert f"--resume {tmp_path / 'step-000001'}" in str(raised.value)


def test_checkpoint_with_a_missing_file_is_refused_by_name(training: Training, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, kept=2)
    file = store.save(training.state, progress(1)).path / "optimizer.pt"
    file.unlink()
    with raises(CheckpointError, "checkpoint_file_missing", path=file) as raised:
        find_resumption(store, "auto")
    assert f"remove {file.parent}" in str(raised.value), "no other one exists"


def test_checkpoint_without_a_manifest_is_refused(training: Training, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, kept=2)
    file = store.save(training.state, progress(1)).path / "manifest.json"
    file.unlink()
    with raises(CheckpointError, "checkpoint_manifest_missing", path=file) as raised:
        find_resumption(store, "auto")
    assert f"remove {file.parent}" in str(raised.value)


def test_checkpoint_with_a_torn_state_is_refused_by_name(training: Training, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, kept=2)
    file = store.save(training.state, progress(1)).path / "trainer_state.json"
    file.write_text("{")
    with raises(CheckpointError, "checkpoint_unreadable", path=file):
        store.newest()


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def link(path: Path) -> None:
    outside = path.parents[2] / "outside"
    path.rename(outside)
    path.symlink_to(outside)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("plant", [fifo, link, folder])
@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("trainer_state.json", "checkpoint_file_missing"),
        ("manifest.json", "checkpoint_unreadable"),
        ("model.safetensors", "checkpoint_file_missing"),
    ],
)
def test_odd_file_in_a_checkpoint_is_an_error_and_blocks_nothing(
    training: Training, tmp_path: Path, plant: Callable[[Path], None], name: str, code: str
) -> None:
    """Another process that writes to the volume may put it there."""
    store = CheckpointStore(tmp_path / "checkpoints", kept=2)
    path = store.save(training.state, progress(1)).path
    plant(path / name)
    with raises(CheckpointError, code, path=path / name):
        store.load(path)
    with raises(CheckpointError, "checkpoint_unreadable" if name == "trainer_state.json" else code, path=path / name):
        read_progress(path)
        store.load(path)


@pytest.mark.parametrize("plant", [fifo, link, folder])
def test_odd_file_of_digests_is_an_error_and_blocks_nothing(tmp_path: Path, plant: Callable[[Path], None]) -> None:
    path = tmp_path / "runs" / "mine" / "digests.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("")
    assert read_digests(path) == []
    plant(path)
    with raises(CheckpointError, "digests_unreadable", path=path):
        read_digests(path)


def test_checkpoints_in_a_linked_folder_are_read(training: Training, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "disk")
    store = CheckpointStore(tmp_path / "checkpoints", kept=2)
    path = store.save(training.state, progress(1)).path
    assert store.load(path).step == 1
