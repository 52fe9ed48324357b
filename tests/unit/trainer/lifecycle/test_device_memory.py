"""Weights in the trainer's device memory, which a server maps or receives. On a CPU, a mapped memory is a file."""

from __future__ import annotations

import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import cast

import msgspec
import pytest
import torch
from tests.support.ports import free_port

from gristmill import PolicyVersion
from gristmill.internal import weight_network
from gristmill.internal.device_memory import BUFFER, FILE, PART, DeviceMemory, decode_handle, encode_handle
from gristmill_model.device_memory import UnusableError, weights_of
from gristmill_trainer.publish.device_memory import DeviceMemoryTransport
from gristmill_trainer.publish.pool import ModelServers
from gristmill_trainer.publish.sender import WeightSender

CPU = torch.device("cpu")


class Servers:
    """Model servers that copy each version when they are asked to load it."""

    in_use: frozenset[Path] = frozenset()

    def __init__(self) -> None:
        self.loaded: dict[str, torch.Tensor] = {}

    def load(self, path: Path, version: PolicyVersion) -> None:
        with weights_of(path, CPU) as tensors:
            self.loaded = {name: tensor.clone() for name, tensor in tensors}

    def close(self) -> None:
        pass


Open = Callable[[Path], tuple[DeviceMemoryTransport, Servers]]


@pytest.fixture(params=["ipc", "nccl"])
def transport(request: pytest.FixtureRequest) -> Iterator[Open]:
    opened: list[DeviceMemoryTransport] = []

    def open_transport(folder: Path) -> tuple[DeviceMemoryTransport, Servers]:
        servers = Servers()
        sender = WeightSender(("127.0.0.1", 9), CPU) if request.param == "nccl" else None
        target = DeviceMemoryTransport(cast("ModelServers", servers), folder, None, device=CPU, sender=sender)
        opened.append(target)
        return target, servers

    yield open_transport
    for target in opened:
        target.close()
    for thread in threading.enumerate():
        if thread.name == "send-weights":
            thread.join(timeout=5)  # it may be about to end
            assert not thread.is_alive(), "it would crash the end of the process"


network = pytest.mark.parametrize("transport", ["nccl"], indirect=True)
memory_only = pytest.mark.parametrize("transport", ["ipc"], indirect=True)


def tensors(seed: int, rows: int = 7) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "bfloat16": torch.randn(rows, 3).bfloat16(),
        "transposed": torch.randn(5, rows).T,
        "scalar": torch.randn(()),
        "empty": torch.empty(0, 4),
        "trained": torch.randn(3, requires_grad=True),
        "integers": torch.arange(300),
    }


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("part", [1, 500, PART])
def test_servers_load_each_version_bit_for_bit(
    transport: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, in_background: bool, part: int
) -> None:
    """`part`: most bytes of a message with several tensors."""
    monkeypatch.setattr("gristmill_trainer.publish.sender.PART", part)
    published, servers = transport(tmp_path)
    for step, rows in ((1, 7), (2, 7), (3, 9)):  # the last version has other shapes
        wanted = tensors(step, rows)
        published.publish(published.copied(wanted) if in_background else wanted, PolicyVersion(1, step))
        assert servers.loaded.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert servers.loaded[name].dtype == tensor.dtype
            assert torch.equal(servers.loaded[name], tensor), name
            assert not servers.loaded[name].requires_grad
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != BUFFER) == ["1.2", "1.3"]
    assert [path.name for path in (tmp_path / "1.3").iterdir()] == [FILE]


def test_version_that_the_trainer_overwrote_is_refused_before_a_load(transport: Open, tmp_path: Path) -> None:
    published, _ = transport(tmp_path)
    published.publish(tensors(1), PolicyVersion(1, 1))
    published.copied(tensors(2))
    with pytest.raises(UnusableError) as refused, weights_of(tmp_path / "1.1", CPU):
        raise AssertionError
    assert refused.value.args[:2] == (503, "weights_replaced")


def test_load_during_which_the_trainer_writes_is_an_error(transport: Open, tmp_path: Path) -> None:
    published, _ = transport(tmp_path)
    published.publish(tensors(1), PolicyVersion(1, 1))

    def load() -> None:
        with weights_of(tmp_path / "1.1", CPU) as weights:
            next(weights)
            published.copied(tensors(2))

    with pytest.raises(RuntimeError):
        load()


@memory_only
@pytest.mark.parametrize("change", ["no buffer", "short buffer", "no description", "other format", "other device"])
def test_memory_that_cannot_be_mapped_is_refused_for_good(transport: Open, tmp_path: Path, change: str) -> None:
    published, _ = transport(tmp_path)
    published.publish(tensors(1), PolicyVersion(1, 1))
    description, buffer = tmp_path / "1.1" / FILE, tmp_path / BUFFER
    if change == "no buffer":
        buffer.unlink()
    elif change == "short buffer":
        buffer.write_bytes(buffer.read_bytes()[:-1])
    elif change == "no description":
        description.unlink()
    elif change == "other format":
        description.write_bytes(description.read_bytes().replace(b"memory-1", b"memory-2"))
    else:
        memory = msgspec.structs.replace(DeviceMemory.read(description.parent), device="GPU-0")
        description.write_bytes(msgspec.json.encode(memory))
    with pytest.raises(UnusableError) as refused, weights_of(tmp_path / "1.1", CPU):
        raise AssertionError
    assert refused.value.args[:2] == (422, "device_memory_unusable")


@network
@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ("other device", (422, "device_memory_unusable")),
        ("other port", (503, "trainer_unreachable")),
        ("other secret", (503, "trainer_unreachable")),
    ],
)
def test_memory_that_cannot_be_received_is_refused(
    transport: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, refusal: tuple[int, str]
) -> None:
    published, servers = transport(tmp_path)
    published.publish(tensors(1), PolicyVersion(1, 1))
    description = tmp_path / "1.1" / FILE
    assert stat.S_IMODE(description.stat().st_mode) == 0o640, "it has the secret"
    memory = DeviceMemory.read(description.parent)
    assert memory.sender is not None
    if change == "other device":
        wrong = msgspec.structs.replace(memory, device="GPU-0")
    else:
        other = {"port": free_port()} if change == "other port" else {"secret": "guess"}
        wrong = msgspec.structs.replace(memory, sender=msgspec.structs.replace(memory.sender, **other))
    description.write_bytes(msgspec.json.encode(wrong))
    monkeypatch.setattr("gristmill.internal.weight_network.TIMEOUT", timedelta(seconds=1))
    with pytest.raises(UnusableError) as refused, weights_of(tmp_path / "1.1", CPU):
        raise AssertionError
    assert refused.value.args[:2] == refusal
    monkeypatch.undo()
    published.publish(tensors(2), PolicyVersion(1, 2))
    assert torch.equal(servers.loaded["integers"], tensors(2)["integers"]), "a wrong secret disturbs no other worker"


@network
def test_worker_that_fails_within_a_load_disturbs_no_other(
    transport: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill_trainer.publish.sender.PART", 1)
    monkeypatch.setattr("gristmill.internal.weight_network.TIMEOUT", timedelta(seconds=20))
    published, servers = transport(tmp_path)
    published.publish(wanted := tensors(1), PolicyVersion(1, 1))

    def fail() -> None:
        with weights_of(tmp_path / "1.1", CPU) as weights:
            next(weights)
            servers.load(tmp_path / "1.1", PolicyVersion(1, 1))  # another worker, meanwhile
            next(weights)
            raise KeyError

    for _ in range(3):
        servers.loaded = {}
        with pytest.raises(KeyError):
            fail()
        assert torch.equal(servers.loaded["transposed"], wanted["transposed"])
    deadline = time.monotonic() + 60
    while len(caplog.messages) < 3:
        assert time.monotonic() < deadline, "the trainer logs each"
        time.sleep(0.01)


@network
def test_worker_that_fails_before_a_load_disturbs_no_other(transport: Open, tmp_path: Path) -> None:
    """It was killed after it had added its request, so it never joins the process group."""
    published, servers = transport(tmp_path)
    published.publish(wanted := tensors(1), PolicyVersion(1, 1))
    sender = DeviceMemory.read(tmp_path / "1.1").sender
    assert sender is not None
    store = weight_network.open_store(torch.distributed, sender.host, sender.port)
    for _ in range(2):
        weight_network.requests(store, sender.secret, 1)
        servers.loaded = {}
        servers.load(tmp_path / "1.1", PolicyVersion(1, 1))
        assert torch.equal(servers.loaded["transposed"], wanted["transposed"])


@network
def test_trainer_listens_on_the_address_that_reaches_the_server_only(transport: Open, tmp_path: Path) -> None:
    published, _ = transport(tmp_path)
    published.publish(tensors(1), PolicyVersion(1, 1))
    sender = DeviceMemory.read(tmp_path / "1.1").sender
    assert sender is not None
    assert sender.host == "127.0.0.1"
    with pytest.raises(OSError), socket.create_connection(("127.0.0.2", sender.port), timeout=5):
        pass


def test_handles_of_a_gpu_are_the_same_after_json() -> None:
    handle = (b"\x00\xff handle", 4096, 0, b"counter", 8, b"event", True)
    memory = DeviceMemory(device="GPU-0", token=1, size=4096, tensors={}, handle=encode_handle(handle))
    read = msgspec.json.decode(msgspec.json.encode(memory), type=DeviceMemory)
    assert tuple(decode_handle(read.handle)) == handle
