"""vLLM's developer endpoints, as far as publishing needs them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from gristmill import PolicyVersion
from gristmill_trainer.errors import PublishError
from gristmill_trainer.policy.lora import ADAPTER_CONFIG

_LOG = logging.getLogger(__name__)

# Seconds a single call may take. Loading reads the whole model from disk.
CALL_TIMEOUT = 30.0
LOAD_TIMEOUT = 600.0


class ModelServer:
    """Client of one vLLM server. Every call has a time-out; failures raise PublishError saying which call failed."""

    def __init__(self, url: str, token: str, patience: float | Callable[[], float] = 600.0) -> None:
        """`patience`: seconds to wait for a server that does not answer, as while it restarts; or what says how many
        at any moment."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self._patience = patience
        self._http = httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {token}"}, timeout=CALL_TIMEOUT)

    @property
    def patience(self) -> float:
        """Seconds."""
        return self._patience() if callable(self._patience) else self._patience

    def served(self) -> dict[str, Any]:
        """The first model of /v1/models; waits for the server to come up."""
        answer = self.wait_for("GET", "/v1/models")
        with self._understanding("GET", "/v1/models"):
            first: dict[str, Any] = answer.json()["data"][0]
        return first

    def wait_for(self, method: str, path: str) -> httpx.Response:
        """Call until the server answers, for `patience` seconds at most."""
        started = time.monotonic()
        told = False
        while True:
            try:
                return self.call(method, path)
            except PublishError as error:
                if error.permanent:
                    raise
                spent = time.monotonic() - started
                if spent > self.patience:
                    raise PublishError(f"{error} (tried for {spent:.0f} s)", permanent=True) from error
                if not told:
                    _LOG.info("waiting for the model server at %s", self.url)
                    told = True
            time.sleep(1.0)

    def call(self, method: str, path: str, *, timeout: float = CALL_TIMEOUT, **request: Any) -> httpx.Response:
        """One call. Raises PublishError for no answer in time and for any error status."""
        try:
            answer = self._http.request(method, path, timeout=timeout, **request)
        except httpx.TransportError as error:
            raise PublishError(
                f"the model server at {self.url} did not answer {method} {path} within {timeout:.0f} s: "
                f"{error or type(error).__name__}; is it running?"
            ) from error
        if answer.is_success:
            return answer
        hint = {
            401: " It does not accept this trainer's token: both must see the same GRISTMILL_WEIGHTS_DIR.",
            404: " Start it by `python -m gristmill_model`, which allows updates, or train with --publisher none.",
        }.get(answer.status_code, "")
        raise PublishError(
            f"the model server at {self.url} answered {method} {path} with {answer.status_code}: "
            f"{answer.text[:300]}.{hint}",
            permanent=answer.is_client_error,
        )

    def ask(self, method: str, path: str, name: str, *, timeout: float = CALL_TIMEOUT, **request: Any) -> Any:
        """One value of one answer. Raises PublishError as `call`, and for an answer without it, as a proxy's page."""
        answer = self.call(method, path, timeout=timeout, **request)
        with self._understanding(method, path):
            return answer.json()[name]

    def served_version(self) -> str:
        """The label of the weights it serves now. Raises PublishError at once when it does not answer."""
        return str(self.ask("GET", "/weight_info", "weight_version"))

    def load(self, path: Path, version: PolicyVersion) -> None:
        """pause(keep) -> reload -> reset prefix cache -> set version -> resume -> read the version back, once.

        `path`: a folder with the whole weights, or with an adapter's. Raises PublishError.
        """
        self._paused(lambda: self._swap(path, version))
        found = self.served_version()
        if found != str(version):
            raise PublishError(f"published version {version}, but the model server at {self.url} says {found}")

    @contextmanager
    def _understanding(self, method: str, path: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, LookupError, TypeError) as error:
            raise PublishError(
                f"{self.url} answers {method} {path}, but not as a model server does ({error!r}); something else may "
                "be in its place"
            ) from error

    def _paused(self, update: Callable[[], None]) -> None:
        """Run `update` while generation stands still, requests kept; generation goes on whatever happens."""
        self.call("POST", "/pause", params={"mode": "keep"})
        try:
            update()
        finally:
            self.call("POST", "/resume")

    def _swap(self, path: Path, version: PolicyVersion) -> None:
        if (path / ADAPTER_CONFIG).is_file():
            load = {"method": "load_adapter", "kwargs": {"path": str(path)}}
        else:
            load = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        self.call("POST", "/collective_rpc", json=load, timeout=LOAD_TIMEOUT)
        # Also the blocks of requests that stand still: they are computed anew from the new weights.
        if not self.ask("POST", "/reset_prefix_cache", "success", params={"reset_running_requests": "true"}):
            raise PublishError(f"the model server at {self.url} kept its prefix cache, which is of the old weights")
        self.call("POST", "/update_weight_version", json={"new_version": str(version)})
