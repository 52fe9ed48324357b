"""Publication of new weights, at once or in the background; the shared folder; the token to publish.

The transport writes files under a temporary name, renames them, and lets the servers load them. device_memory.py has
the transport that writes no weights.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from gristmill import GristmillError, PolicyVersion
from gristmill.deployment import weight_files
from gristmill.errors import of_thread
from gristmill.internal.disk import write_file
from gristmill_trainer.disk import writing
from gristmill_trainer.errors import PublishError
from gristmill_trainer.policy.lora import ADAPTER_WEIGHTS
from gristmill_trainer.publish.pool import ModelServers
from gristmill_trainer.stop import StopRequest

_LOG = logging.getLogger(__name__)
Tensors = Mapping[str, torch.Tensor]
"""All tensors with the server's names and shapes, including the head; or an adapter's tensors with the names of peft's
files."""
KEPT = 2


class Publisher:
    """Publishes weights and announces their versions: at once, or in the background on a copy of the weights.

    The background is for runs whose environment may be a step behind (max_staleness > 0). A synchronous run would only
    wait elsewhere. In the background, one publication runs at a time in a thread, while the trainer continues.
    `publish`, `ensure` or `wait` raises the error of the thread.

    The servers prove a version after it is announced, so that environments sample meanwhile. A synchronous trainer
    calls `settle` before it trains on these completions. In the background the thread waits for the proof.
    """

    def __init__(
        self,
        transport: FilesystemTransport | None,
        announce: Callable[[PolicyVersion], object],
        stop: StopRequest,
        *,
        background: bool = False,
    ) -> None:
        """`transport`: None announces versions and publishes nothing, for a server that may not be updated. Completions
        become more off-policy with every step then; importance weights correct this. `announce`: called once a version
        is served, to notify the API. `stop`: shortens waits."""
        self._transport = transport
        self._announce = announce
        self._stop = stop
        self._background = background
        self._thread: threading.Thread | None = None
        self._failure: GristmillError | None = None

    def publish(self, tensors: Tensors, version: PolicyVersion) -> None:
        """Returns when the version is served and announced. Raises PublishError.

        In the background, copies the tensors and starts their publication. First waits for the previous one, because
        versions only rise.
        """
        if self._transport is None or not self._background:
            self._publish(tensors, version)
            return
        self._join()
        copies = self._transport.copied(tensors)
        self._thread = threading.Thread(target=self._run, args=(copies, version), name="publish", daemon=True)
        self._thread.start()

    @property
    def publishing(self) -> bool:
        """Whether a publication is in progress in the background."""
        return self._thread is not None and self._thread.is_alive()

    def ensure(self) -> None:
        """Publishes the last weights again to restarted servers, unless a publication is in progress."""
        if self.publishing:
            return
        self._join()
        if self._transport is not None:
            self._transport.servers.ensure()

    def sleep(self) -> None:
        """Lets the servers free their memory on the GPU until the next publication or `wake`. In a synchronous run."""
        assert self._transport is not None
        self._transport.sleep()

    def wake(self) -> Sequence[str]:
        """Ends a sleep: the servers serve the last weights again. Returns the URLs of those that do not."""
        return [] if self._transport is None else self._transport.servers.wake()

    def settle(self) -> None:
        """In a synchronous run, does what `wait` does. In the background, returns at once."""
        if not self._background:
            self.wait()

    def wait(self) -> None:
        """Returns when the last publication is served, announced and proven.

        Raises the error of the publication, or StoppedError if a stop is requested meanwhile.
        """
        self._join()
        if self._transport is not None:
            self._transport.servers.prove()

    def _join(self) -> None:
        """Returns when no thread publishes any more."""
        if self._thread is not None:
            while self.publishing:
                self._thread.join(timeout=1.0)
                if self.publishing:
                    self._stop.raise_if_requested()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        """Waits within the grace period for the publication in progress, then closes the transport."""
        if self._thread is not None:
            self._thread.join(timeout=max(0.0, min(self._stop.seconds_left, self._stop.grace)))
        if self._transport is not None:
            self._transport.close()

    def _publish(self, tensors: Tensors, version: PolicyVersion) -> None:
        if self._transport is not None:
            self._transport.publish(tensors, version)
        self._announce(version)

    def _run(self, tensors: Tensors, version: PolicyVersion) -> None:
        assert self._transport is not None
        try:
            self._publish(tensors, version)
            self._transport.servers.prove()
        except Exception as error:  # noqa: BLE001  Raised by the next call: a full disk must not end the thread unheard.
            self._failure = of_thread(f"publishing version {version}", error)


class FilesystemTransport:
    """Writes `folder`/<version>/model.safetensors or an adapter's files, and lets the running `servers` load them."""

    def __init__(
        self,
        servers: ModelServers,
        folder: Path,
        served_weights: Path | None,
        describe_adapters: Callable[[Path], None] | None = None,
        original: Path | None = None,
    ) -> None:
        """`served_weights`: the folder that the server first loaded; publications must have its shapes.
        `describe_adapters`: for an adapter's tensors, writes its adapter_config.json into a folder. `original`: the
        folder that the trainer first loaded; tensors in it that its model does not use are never published."""
        self.servers = servers
        self._folder = folder.absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        for partial in self._folder.glob(".*.partial"):  # Left by a killed trainer; never reused.
            shutil.rmtree(partial)
        self._describe_adapters = describe_adapters
        self._expected = None if served_weights is None or describe_adapters is not None else shapes(served_weights)
        self._original = {} if self._expected is None or original is None else shapes(original)

    def copied(self, tensors: Tensors) -> Tensors:
        """Returns a copy of the tensors that `publish` takes later. At most one copy is in use."""
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    def publish(self, tensors: Tensors, version: PolicyVersion) -> None:
        """Returns when these weights are served under this version. Raises PublishError.

        The servers then prove in the background that they serve the weights.
        """
        self._check(tensors)
        path = self._write(tensors, version)
        self.servers.load(path, version)
        self._prune()

    def sleep(self) -> None:
        # The next publication brings all weights, or an adapter to the weights that vLLM keeps at level 1.
        self.servers.sleep(1 if self._describe_adapters is not None else 2)

    def close(self) -> None:
        self.servers.close()

    def _write(self, tensors: Tensors, version: PolicyVersion) -> Path:
        target = self._folder / str(version)
        temporary = self._folder / f".{version}.partial"
        for leftover in (temporary, target):
            shutil.rmtree(leftover, ignore_errors=True)
        with writing(target, PublishError, "Weights of other runs in the folder beside may go"):
            temporary.mkdir()
            self._save(tensors, temporary)
            temporary.rename(target)
        return target

    def _save(self, tensors: Tensors, folder: Path) -> None:
        if self._describe_adapters is not None:
            self._describe_adapters(folder)
        whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        file = folder / ("model.safetensors" if self._describe_adapters is None else ADAPTER_WEIGHTS)
        save_file(whole, file, metadata={"format": "pt"})
        file.chmod(0o644)  # The server runs as another user of the same group.

    def _check(self, tensors: Tensors) -> None:
        """Raises PublishError for wrong shapes, because loading them would kill the server's engine."""
        if self._expected is None:
            return
        written = {name: list(tensor.shape) for name, tensor in tensors.items()}
        names = self._expected.keys() - (self._original.keys() - written.keys()) | written.keys()
        wrong = sorted(name for name in names if self._expected.get(name) != written.get(name))
        if wrong:
            name = wrong[0]
            here, there = written.get(name, "missing"), self._expected.get(name, "missing")
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
        """Keeps the newest `KEPT` versions, and those that a server reads or may return to.

        Newest by time, not by version: versions restart when a run is deleted and created again.
        """
        versions = [path for path in self._folder.iterdir() if path.name[0] != "."]
        for old in sorted(versions, key=lambda path: path.stat().st_mtime_ns)[:-KEPT]:
            if old not in self.servers.in_use:
                try:
                    shutil.rmtree(old)
                except OSError as error:  # On NFS, a file that another machine reads stays. The next call removes it.
                    _LOG.warning("the old weights in %s are not removed yet: %s", old, error)


def shapes(folder: Path) -> dict[str, list[int]]:
    """Reads the shapes of all tensors in the safetensors files of a folder's model."""
    shapes_by_name: dict[str, list[int]] = {}
    for path in weight_files(folder):
        with safe_open(path, framework="np") as tensors:
            shapes_by_name |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    return shapes_by_name


def claim_publishing(weights_dir: Path) -> str:
    """Replaces `weights_dir`/token with a new token and returns it.

    From then on the model servers refuse the previous trainer (`fenced`), whenever it continues. Call this function
    after the run is taken, and ask the API afterwards whether the run still belongs to this trainer. If the trainer was
    stopped between the two, it replaces the token of its successor. The successor's next publication is then refused,
    and it has to be started again.

    Only a process that may write to the weights folder can make the servers load from it.
    """
    weights_dir.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(32)
    # The server runs as another user of the same group.
    write_file(weights_dir / "token", token.encode(), mode=0o640, several=True)
    return token
