"""Publication through a shared folder: files are written under a temporary name, renamed, and loaded by the server."""

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
    """Writes `folder`/<version>/model.safetensors or an adapter's files, and lets the running `servers` load them."""

    def __init__(
        self,
        servers: ModelServers,
        folder: Path,
        served_weights: Path | None,
        describe_adapters: Callable[[Path], None] | None = None,
    ) -> None:
        """`served_weights`: the folder that the server first loaded; publications must have its shapes.
        `describe_adapters`: for an adapter's tensors, writes its adapter_config.json into a folder."""
        self._servers = servers
        self._folder = folder.absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        for partial in self._folder.glob(".*.partial"):  # Left by a killed trainer; never reused.
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
        """Raises PublishError for wrong shapes, because loading them would kill the server's engine."""
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
        """Keeps the newest `KEPT` versions: the server may still read the previous version, or return to it.

        Newest by time, not by version: versions restart when a run is deleted and created again.
        """
        versions = [path for path in self._folder.iterdir() if path.name[0] != "."]
        for old in sorted(versions, key=lambda path: path.stat().st_mtime_ns)[:-KEPT]:
            shutil.rmtree(old)


def _shapes(folder: Path) -> dict[str, list[int]]:
    """Reads the shapes of all tensors from the headers of a folder's safetensors files."""
    shapes: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        shapes |= {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    return shapes
