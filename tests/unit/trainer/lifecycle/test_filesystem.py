"""The folder of published weights contains exactly the files that the servers need."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import pytest
import torch
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


def test_publisher_keeps_the_version_that_a_server_still_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gristmill_trainer.publish.pool._OTHERS_LEAST", 0.3)
    pair = [ModelServerStandIn(), ModelServerStandIn()]
    servers = ModelServers([ModelServer(server.url, "token") for server in pair])
    publisher = FilesystemTransport(servers, tmp_path, None)
    publisher.publish({"w": torch.ones(1)}, PolicyVersion(1, 0))
    pair[1].load_seconds = 4.0
    for step in range(1, 5):
        publisher.publish({"w": torch.ones(1)}, PolicyVersion(1, step))
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {"1.0", "1.1", "1.3", "1.4"}, "it loads 1.1, and has 1.0 if that fails"
    while pair[1].version != "1.4":
        time.sleep(0.01)
    publisher.publish({"w": torch.ones(1)}, PolicyVersion(1, 5))
    assert {path.name for path in tmp_path.iterdir()} == {"1.4", "1.5"}
    for server in pair:
        server.stop()


def test_publisher_keeps_the_version_whose_load_timed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server executes a request to its end, also when the trainer waits no longer."""
    monkeypatch.setattr("gristmill_trainer.publish.pool._OTHERS_LEAST", 0.1)
    monkeypatch.setattr("gristmill_trainer.publish.servers.LOAD_TIMEOUT", 0.5)
    pair = [ModelServerStandIn(), ModelServerStandIn()]
    publisher = FilesystemTransport(ModelServers([ModelServer(one.url, "token") for one in pair]), tmp_path, None)
    publisher.publish({"w": torch.ones(1)}, PolicyVersion(1, 0))
    pair[1].load_seconds = 5.0
    publisher.publish({"w": torch.ones(1)}, PolicyVersion(1, 1))
    time.sleep(2.0)
    for step in range(2, 6):
        publisher.publish({"w": torch.ones(1)}, PolicyVersion(1, step))
    assert {path.name for path in tmp_path.iterdir()} == {"1.0", "1.1", "1.4", "1.5"}
    pair[1].load_seconds = 0.0
    while pair[1].version != "1.5":
        time.sleep(0.01)
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
