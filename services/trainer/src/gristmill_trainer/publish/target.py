"""The server, or the servers, that load what was written to the weights folder."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Protocol

from gristmill import PolicyVersion
from gristmill_trainer.errors import PublishError
from gristmill_trainer.policy.lora import ADAPTER_CONFIG
from gristmill_trainer.publish.server import LOAD_TIMEOUT, ModelServer

_LOG = logging.getLogger(__name__)
# Seconds between two attempts at a server that answers, but did not take the weights.
PAUSE = 0.5


class LoadTarget(Protocol):
    """What loads a published folder."""

    def load(self, path: Path, version: PolicyVersion) -> None:
        """Return when the weights in `path` are served as `version`. Raises PublishError."""

    def ensure(self, path: Path, version: PolicyVersion) -> None:
        """Load `path` where `version` is no longer served. Waits for no server that is away. Raises PublishError."""

    def close(self) -> None:
        """End what works in the background."""


class OneServer:
    """One server. An attempt that failed is repeated while the server's patience lasts."""

    def __init__(self, server: ModelServer) -> None:
        self.server = server
        self._away_since: float | None = None
        """When `ensure` first found it away, by time.monotonic()."""

    def load(self, path: Path, version: PolicyVersion) -> None:
        """Load, and try again while the server is away: it may be killed at any point and come back untouched."""
        started = time.monotonic()
        while True:
            try:
                self.attempt(path, version)
                return
            except PublishError as error:
                if error.permanent or time.monotonic() - started > self.server.patience:
                    raise
                _LOG.warning("publishing version %s: %s; trying again", version, error)
            self.server.wait_for("GET", "/health")
            time.sleep(PAUSE)

    def ensure(self, path: Path, version: PolicyVersion) -> None:
        """Look once. A server that is away is looked at again with the next call, while its patience lasts."""
        try:
            if self.served_version() != str(version):
                self.tell_restart(version)
                self.attempt(path, version)
        except PublishError as error:
            self._away_since = self._away_since or time.monotonic()
            spent = time.monotonic() - self._away_since
            if error.permanent:
                raise
            if spent > self.server.patience:
                raise PublishError(f"{error} (tried for {spent:.0f} s)", permanent=True) from error
            _LOG.info("%s", error)
        else:
            self._away_since = None

    def close(self) -> None:
        """Nothing works in the background."""

    def tell_restart(self, version: PolicyVersion) -> None:
        _LOG.warning(
            "the model server at %s no longer serves version %s (was it restarted?): publishing again",
            self.server.url,
            version,
        )

    def attempt(self, path: Path, version: PolicyVersion) -> None:
        """pause(keep) -> reload -> reset prefix cache -> set version -> resume -> read the version back, once."""
        self.server.paused(lambda: self._swap(path, version))
        found = self.served_version()
        if found != str(version):
            raise PublishError(f"published version {version}, but the model server at {self.server.url} says {found}")

    def served_version(self) -> str:
        """The label of the weights it serves now. Raises PublishError at once when it does not answer."""
        return str(self.server.call("GET", "/weight_info").json()["weight_version"])

    def _swap(self, path: Path, version: PolicyVersion) -> None:
        call = self.server.call
        if (path / ADAPTER_CONFIG).is_file():
            load = {"method": "load_adapter", "kwargs": {"path": str(path)}}
        else:
            load = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        call("POST", "/collective_rpc", json=load, timeout=LOAD_TIMEOUT)
        # Also the blocks of requests that stand still: they are computed anew from the new weights.
        reset = call("POST", "/reset_prefix_cache", params={"reset_running_requests": "true"}).json()
        if not reset["success"]:
            raise PublishError(
                f"the model server at {self.server.url} kept its prefix cache, which is of the old weights"
            )
        call("POST", "/update_weight_version", json={"new_version": str(version)})
