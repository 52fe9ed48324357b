"""The folder of published weights contains exactly the files that the servers need."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.support.errors import raises
from tests.unit.trainer.lifecycle.model_server import ModelServerStandIn

from gristmill import PolicyVersion
from gristmill_trainer.errors import PublishError
from gristmill_trainer.publish.pool import ModelServers
from gristmill_trainer.publish.publisher import FilesystemTransport
from gristmill_trainer.publish.servers import ModelServer


def test_publisher_removes_partial_weights_of_a_kill(tmp_path: Path) -> None:
    server = ModelServerStandIn()
    killed = tmp_path / ".1.20.partial"
    killed.mkdir()
    (killed / "model.safetensors").write_bytes(b"half")
    publisher = FilesystemTransport(ModelServers([ModelServer(server.url, "token")]), tmp_path, None)
    for step in range(20, 23):
        publisher.publish({"w": torch.ones(1)}, PolicyVersion(2, step))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2.21", "2.22"]
    assert server.version == "2.22"
    server.stop()


def test_publisher_keeps_the_versions_of_a_new_run_with_an_old_id(tmp_path: Path) -> None:
    """Versions start again: the earlier run's versions are higher, and are still deleted first."""
    server = ModelServerStandIn()
    for version in (PolicyVersion(3, 59), PolicyVersion(3, 60), PolicyVersion(1, 0), PolicyVersion(1, 1)):
        publisher = FilesystemTransport(ModelServers([ModelServer(server.url, "token")]), tmp_path, None)
        publisher.publish({"w": torch.ones(1)}, version)
        assert (tmp_path / str(version)).is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.0", "1.1"]
    server.stop()


@pytest.mark.parametrize("unused", ["layers.0.rotary_emb.inv_freq", "layers.0.attention.masked_bias"])
def test_tensors_of_a_model_that_transformers_does_not_use_are_not_missed(tmp_path: Path, unused: str) -> None:
    used = {"w": torch.ones(2), "v": torch.ones(3)}
    served, original, other = (tmp_path / name for name in ("served", "original", "other"))
    for folder, tensors in ((served, used), (original, used), (other, {"w": used["w"]})):
        folder.mkdir()
        save_file({**tensors, **({} if folder == other else {unused: torch.ones(4)})}, folder / "model.safetensors")
        save_file({"tok_embeddings.weight": torch.ones(9)}, folder / "consolidated.safetensors")
    server = ModelServerStandIn()
    servers = ModelServers([ModelServer(server.url, "token")])

    def publish(tensors: dict[str, torch.Tensor], original: Path, step: int = 1) -> None:
        transport = FilesystemTransport(servers, tmp_path / "weights", served, original=original)
        transport.publish(tensors, PolicyVersion(1, step))

    publish(used, original)
    assert server.version == "1.1"
    for wrong, name in (({**used, "v": torch.ones(4)}, "v"), ({**used, "x": used["v"]}, "x")):
        with raises(PublishError, "shape_mismatch", tensor=name):
            publish(wrong, original)
    with raises(PublishError, "shape_mismatch", tensor=unused):
        publish(used, other)
    server.stop()


def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


def test_publisher_keeps_the_version_that_a_server_still_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = [ModelServerStandIn(), ModelServerStandIn()]
    servers = ModelServers([ModelServer(server.url, "token") for server in pair])
    publisher = FilesystemTransport(servers, tmp_path, None)
    publisher.publish({"w": torch.ones(1)}, PolicyVersion(1, 0))
    monkeypatch.setattr("gristmill_trainer.publish.pool._OTHERS_LEAST", 0.3)
    pair[1].hold_loads()
    for step in range(1, 5):
        publisher.publish({"w": torch.ones(1)}, PolicyVersion(1, step))
        _until(lambda: len(pair[1].begun) == 2)
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {"1.0", "1.1", "1.3", "1.4"}, "it loads 1.1, and has 1.0 if that fails"
    pair[1].release_loads()
    _until(lambda: servers.in_use == {tmp_path / "1.4"})
    publisher.publish({"w": torch.ones(1)}, PolicyVersion(1, 5))
    assert {path.name for path in tmp_path.iterdir()} == {"1.4", "1.5"}
    for server in pair:
        server.stop()


def test_publisher_keeps_the_version_whose_load_timed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server executes a request to its end, also when the trainer waits no longer."""
    pair = [ModelServerStandIn(), ModelServerStandIn()]
    servers = ModelServers([ModelServer(one.url, "token") for one in pair])
    publisher = FilesystemTransport(servers, tmp_path, None)
    publisher.publish({"w": torch.ones(1)}, PolicyVersion(1, 0))
    monkeypatch.setattr("gristmill_trainer.publish.pool._OTHERS_LEAST", 0.1)
    monkeypatch.setattr("gristmill_trainer.publish.servers.LOAD_TIMEOUT", 0.5)
    pair[1].hold_loads()
    publisher.publish({"w": torch.ones(1)}, PolicyVersion(1, 1))
    _until(lambda: len(pair[1].begun) > 2)  # The request timed out, and another one came.
    for step in range(2, 6):
        publisher.publish({"w": torch.ones(1)}, PolicyVersion(1, step))
    assert {path.name for path in tmp_path.iterdir()} == {"1.0", "1.1", "1.4", "1.5"}
    pair[1].release_loads()
    _until(lambda: servers.in_use == {tmp_path / "1.5"})
    monkeypatch.undo()
    publisher.publish({"w": torch.ones(1)}, PolicyVersion(1, 6))
    assert {path.name for path in tmp_path.iterdir()} == {"1.5", "1.6"}
    for server in pair:
        server.stop()


def test_publication_to_a_full_disk_fails_with_one_line(tmp_path: Path) -> None:
    server = ModelServerStandIn()
    publisher = FilesystemTransport(ModelServers([ModelServer(server.url, "token")]), tmp_path, None)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with raises(PublishError, "write_failed", path=tmp_path / "1.1"):
            publisher.publish({"w": torch.ones(10_000)}, PolicyVersion(1, 1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    publisher.publish({"w": torch.ones(10_000)}, PolicyVersion(1, 1))
    assert server.version == "1.1"
    server.stop()
