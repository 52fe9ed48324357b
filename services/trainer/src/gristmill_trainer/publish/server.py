"""The trainer's client of one model server."""

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

_LOG = logging.getLogger(__name__)

# Seconds per call. Loading reads the whole model from disk.
CALL_TIMEOUT = 30.0
LOAD_TIMEOUT = 600.0


class ModelServer:
    """Client of one server. Every call has a time-out; a failed call raises PublishError with its method and path."""

    def __init__(self, url: str, token: str = "", patience: float | Callable[[], float] = 600.0) -> None:
        """`token`: needed only for `publish`. `patience`: seconds to wait for an unresponsive server, as during its
        restart, or a function that returns them."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self._patience = patience
        self._http = httpx.Client(base_url=self.url, timeout=CALL_TIMEOUT)
        if token:
            self.authorize(token)

    def authorize(self, token: str) -> None:
        """Sends `token` with all later calls."""
        self._http.headers["Authorization"] = f"Bearer {token}"

    @property
    def patience(self) -> float:
        """Seconds to wait for a server that does not answer."""
        return self._patience() if callable(self._patience) else self._patience

    def served(self) -> dict[str, Any]:
        """Returns the first model of /v1/models. Waits until the server answers."""
        answer = self.wait_for("GET", "/v1/models")
        with self._understanding("GET", "/v1/models"):
            first: dict[str, Any] = answer.json()["data"][0]
        return first

    def wait_for(self, method: str, path: str) -> httpx.Response:
        """Repeats a call until the server answers, for at most `patience` seconds. Raises PublishError."""
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
                    raise error.given_up(spent) from error
                if not told:
                    _LOG.info("waiting for the model server at %s", self.url)
                    told = True
            time.sleep(1.0)

    def call(self, method: str, path: str, *, timeout: float = CALL_TIMEOUT, **request: Any) -> httpx.Response:
        """Sends one request. Raises PublishError for a time-out and for any error status."""
        try:
            answer = self._http.request(method, path, timeout=timeout, **request)
        except httpx.TransportError as error:
            raise PublishError(
                "model_server_unreachable",
                f"the model server at {self.url} did not answer {method} {path} within {timeout:.0f} s: "
                f"{error or type(error).__name__}; is it running?",
                url=self.url,
                request=f"{method} {path}",
            ) from error
        if answer.is_success:
            return answer
        hint = {
            401: " It does not accept this trainer's token: both must see the same GRISTMILL_WEIGHTS_DIR.",
            409: " Only one trainer at a time may publish.",
            404: " Start it by `python -m gristmill_model`, which allows updates, or train with --publisher none.",
        }.get(answer.status_code, "")
        raise PublishError(
            "model_server_refused",
            f"the model server at {self.url} answered {method} {path} with {answer.status_code}: "
            f"{answer.text[:300]}.{hint}",
            permanent=answer.is_client_error,
            url=self.url,
            request=f"{method} {path}",
            status=answer.status_code,
        )

    def ask(self, method: str, path: str, name: str, *, timeout: float = CALL_TIMEOUT, **request: Any) -> Any:
        """Returns the value `name` of a JSON answer. Raises PublishError as `call`, and for an answer without it."""
        answer = self.call(method, path, timeout=timeout, **request)
        with self._understanding(method, path):
            return answer.json()[name]

    def served_version(self) -> str:
        """Returns the version that the server serves now. Raises PublishError at once if the server does not answer."""
        return str(self.ask("GET", "/weight_info", "weight_version"))

    def publish(self, path: Path, version: PolicyVersion) -> None:
        """Publishes the weights in folder `path` and returns when the server serves them under the label `version`.

        `path`: whole weights, or an adapter's files. The server executes the request to its end, even if this process
        is killed in the meantime. Raises PublishError.
        """
        body = {"path": str(path), "version": str(version)}
        found = self.ask("POST", "/gristmill/publish", "weight_version", timeout=LOAD_TIMEOUT, json=body)
        if found != str(version):
            raise PublishError(
                "other_version_served",
                f"published version {version}, but the model server at {self.url} says {found}",
                url=self.url,
                version=str(version),
                served=found,
            )

    @contextmanager
    def _understanding(self, method: str, path: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, LookupError, TypeError) as error:
            raise PublishError(
                "not_a_model_server",
                f"{self.url} answers {method} {path}, but not as a model server does ({error!r}); something else may "
                "be in its place",
                url=self.url,
                request=f"{method} {path}",
            ) from error
