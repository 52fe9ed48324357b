"""Weights in the trainer's device memory, which a server maps. On a CPU, this memory is a file."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import msgspec
import pytest
import torch

from gristmill import PolicyVersion
from gristmill.internal.device_memory import BUFFER, FILE, DeviceMemory, decode_handle, encode_handle
from gristmill_model.device_memory import UnusableError, mapped
from gristmill_trainer.publish.device_memory import DeviceMemoryTransport
from gristmill_trainer.publish.pool import ModelServers

CPU = torch.device("cpu")


class Servers:
    """Model servers that copy each version when they are asked to load it."""

    in_use: frozenset[Path] = frozenset()

    def __init__(self) -> None:
        self.loaded: dict[str, torch.Tensor] = {}

    def load(self, path: Path, version: PolicyVersion) -> None:
        with mapped(path, CPU) as tensors:
            self.loaded = {name: tensor.clone() for name, tensor in tensors}


def transport(folder: Path) -> tuple[DeviceMemoryTransport, Servers]:
    servers = Servers()
    return DeviceMemoryTransport(cast("ModelServers", servers), folder, None, device=CPU), servers


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
def test_servers_load_each_version_bit_for_bit(tmp_path: Path, *, in_background: bool) -> None:
    published, servers = transport(tmp_path)
    for step, rows in ((1, 7), (2, 7), (3, 9)):  # the last version has other shapes
        wanted = tensors(step, rows)
        published.publish(published.copied(wanted) if in_background else wanted, PolicyVersion(1, step))
        assert servers.loaded.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert servers.loaded[name].dtype == tensor.dtype
            assert torch.equal(servers.loaded[name], tensor), name
            assert not servers.loaded[name].requires_grad
    assert sorted(path.name for path in tmp_path.iterdir()) == [BUFFER, "1.2", "1.3"]
    assert [path.name for path in (tmp_path / "1.3").iterdir()] == [FILE]


def test_version_that_the_trainer_overwrote_is_refused_before_a_load(tmp_path: Path) -> None:
    published, _ = transport(tmp_path)
    published.publish(tensors(1), PolicyVersion(1, 1))
    published.copied(tensors(2))
    with pytest.raises(UnusableError) as refused, mapped(tmp_path / "1.1", CPU):
        raise AssertionError
    assert refused.value.args[:2] == (503, "weights_replaced")


def test_load_during_which_the_trainer_writes_is_an_error(tmp_path: Path) -> None:
    published, _ = transport(tmp_path)
    published.publish(tensors(1), PolicyVersion(1, 1))

    def load() -> None:
        with mapped(tmp_path / "1.1", CPU) as weights:
            next(weights)
            published.copied(tensors(2))

    with pytest.raises(RuntimeError):
        load()


@pytest.mark.parametrize("change", ["no buffer", "short buffer", "no description", "other format", "other device"])
def test_memory_that_cannot_be_mapped_is_refused_for_good(tmp_path: Path, change: str) -> None:
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
    with pytest.raises(UnusableError) as refused, mapped(tmp_path / "1.1", CPU):
        raise AssertionError
    assert refused.value.args[:2] == (422, "device_memory_unusable")


def test_handles_of_a_gpu_are_the_same_after_json() -> None:
    handle = (b"\x00\xff handle", 4096, 0, b"counter", 8, b"event", True)
    memory = DeviceMemory(device="GPU-0", token=1, size=4096, tensors={}, handle=encode_handle(handle))
    read = msgspec.json.decode(msgspec.json.encode(memory), type=DeviceMemory)
    assert tuple(decode_handle(read.handle)) == handle
