"""Weights by a shared folder: written beside, renamed into place, loaded by the server."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save_file

from gristmill import PolicyVersion
from gristmill_trainer.disk import writing
from gristmill_trainer.errors import PublishError
from gristmill_trainer.policy.lora import ADAPTER_WEIGHTS
from gristmill_trainer.publish.base import Tensors
from gristmill_trainer.publish.servers import ModelServers

KEPT = 2


class FilesystemPublisher:
    """Writes `folder`/<version>/model.safetensors, or the files of an adapter, and has `servers` load it while they
    serve."""

    def __init__(
        self,
        servers: ModelServers,
        folder: Path,
        served_weights: Path | None,
        describe_adapters: Callable[[Path], None] | None = None,
    ) -> None:
        """`served_weights`: the folder that the server first loaded; publications are checked against its shapes.
        `describe_adapters`, for tensors that are an adapter's: writes its adapter_config.json into a folder."""
        self._servers = servers
        self._folder = folder.absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        for partial in self._folder.glob(".*.partial"):  # A kill leaves it, and its name never comes again.
            shutil.rmtree(partial)
        self._describe_adapters = describe_adapters
        self._expected = None if served_weights is None or describe_adapters is not None else _shapes(served_weights)

    def publish(self, tensors: Tensors, version: PolicyVersion) -> None:
        path = self._write(tensors, version)
        self._check(path)
        self._servers.load(path, version)
        self._prune()

    def ensure(self) -> None:
        self._servers.ensure()

    def close(self) -> None:
        self._servers.close()

    def _write(self, tensors: Tensors, version: PolicyVersion) -> Path:
        target = self._folder / str(version)
        temporary = self._folder / f".{version}.partial"
        for leftover in (temporary, target):
            shutil.rmtree(leftover, ignore_errors=True)
        whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        with writing(target, PublishError, "Weights of other runs in the folder beside may go"):
            temporary.mkdir()
            if self._describe_adapters is not None:
                self._describe_adapters(temporary)
            file = temporary / ("model.safetensors" if self._describe_adapters is None else ADAPTER_WEIGHTS)
            save_file(whole, file, metadata={"format": "pt"})
            file.chmod(0o644)  # The server runs as another user of the same group.
            temporary.rename(target)
        return target

    def _check(self, path: Path) -> None:
        """A reload whose shapes do not match would kill the server's engine, so compare first."""
        if self._expected is None:
            return
        found = _shapes(path)
        wrong = sorted(
            name for name in self._expected.keys() | found.keys() if self._expected.get(name) != found.get(name)
        )
        if wrong:
            name = wrong[0]
            here, there = found.get(name, "missing"), self._expected.get(name, "missing")
            raise PublishError(
                "shape_mismatch",
                f"{len(wrong)} tensors do not fit the served model; first: {name} is {here} here and {there} in the "
                "server. Trainer and model server must run the same MODEL.",
                permanent=True,
                tensor=name,
                here=here,
                served=there,
            )

    def _prune(self) -> None:
        """Keep the newest `KEPT`: the server may still be reading the one before, or go back to it.

        The newest by time, not by version: versions start again when a run is deleted and created again.
        """
        versions = [path for path in self._folder.iterdir() if path.name[0] != "."]
        for old in sorted(versions, key=lambda path: path.stat().st_mtime_ns)[:-KEPT]:
            shutil.rmtree(old)


def _shapes(folder: Path) -> dict[str, list[int]]:
    """Tensor name to shape, over all safetensors files of a folder, from their headers alone."""
    shapes: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        shapes |= {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    return shapes
