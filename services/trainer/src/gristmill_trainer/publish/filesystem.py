"""Weights by a shared folder: written beside, renamed into place, loaded by the server."""

from __future__ import annotations

import json
import logging
import shutil
import struct
import time
from pathlib import Path

from safetensors.torch import save_file

from gristmill import PolicyVersion
from gristmill_trainer.errors import PublishError
from gristmill_trainer.policy import Policy
from gristmill_trainer.publish.server import LOAD_TIMEOUT, ModelServer

_LOG = logging.getLogger(__name__)
KEPT = 2


class FilesystemPublisher:
    """Writes `folder`/<version>/model.safetensors and has the server load it while it runs.

    pause(keep) -> reload -> reset prefix cache -> set version -> resume -> read the version back. The
    cache must go, for its keys and values are the old weights'.
    """

    def __init__(self, server: ModelServer, folder: Path, served_weights: Path | None) -> None:
        """`served_weights`: the folder that the server first loaded; publications are checked against its shapes."""
        self._server = server
        self._folder = folder.absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._expected = None if served_weights is None else _shapes(served_weights)

    def publish(self, policy: Policy, version: PolicyVersion) -> None:
        path = self._write(policy, version)
        self._check(path)
        self._load(path, version)
        self._prune()

    def ensure(self, version: PolicyVersion) -> None:
        if self._server.weight_version() != str(version):
            _LOG.warning("the model server no longer serves version %s (was it restarted?): publishing again", version)
            self._load(self._folder / str(version), version)

    def _write(self, policy: Policy, version: PolicyVersion) -> Path:
        target = self._folder / str(version)
        temporary = self._folder / f".{version}.partial"
        for leftover in (temporary, target):
            shutil.rmtree(leftover, ignore_errors=True)
        temporary.mkdir()
        file = temporary / "model.safetensors"
        tensors = {name: tensor.cpu().contiguous() for name, tensor in policy.served_tensors().items()}
        save_file(tensors, file, metadata={"format": "pt"})
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
                f"{len(wrong)} tensors do not fit the served model; first: {name} is {here} here and {there} in the "
                "server. Trainer and model server must run the same MODEL.",
                permanent=True,
            )

    def _load(self, path: Path, version: PolicyVersion) -> None:
        """Load, and try again while the server is away: it may be killed at any point and come back untouched."""
        deadline = time.monotonic() + self._server.patience
        while True:
            try:
                self._server.paused(lambda: self._swap(path, version))
                found = self._server.weight_version()
                if found == str(version):
                    return
                problem: PublishError = PublishError(
                    f"published version {version}, but the model server at {self._server.url} says {found}"
                )
            except PublishError as error:
                if error.permanent or time.monotonic() > deadline:
                    raise
                problem = error
            _LOG.warning("publishing version %s: %s; trying again", version, problem)
            self._server.wait_for("GET", "/health")
            time.sleep(0.5)

    def _swap(self, path: Path, version: PolicyVersion) -> None:
        call = self._server.call
        load = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        call("POST", "/collective_rpc", json=load, timeout=LOAD_TIMEOUT)
        # Also the blocks of requests that stand still: they are computed anew from the new weights.
        reset = call("POST", "/reset_prefix_cache", params={"reset_running_requests": "true"}).json()
        if not reset["success"]:
            raise PublishError(
                f"the model server at {self._server.url} kept its prefix cache, which is of the old weights"
            )
        call("POST", "/update_weight_version", json={"new_version": str(version)})

    def _prune(self) -> None:
        """Keep the newest `KEPT`: the server may still be reading the one before."""
        versions = sorted(PolicyVersion.parse(path.name) for path in self._folder.iterdir() if path.name[0] != ".")
        for old in versions[:-KEPT]:
            shutil.rmtree(self._folder / str(old))


def _shapes(folder: Path) -> dict[str, list[int]]:
    """Tensor name to shape, over all safetensors files of a folder, from their headers alone."""
    shapes: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        shapes |= {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    return shapes
