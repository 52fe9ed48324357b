"""The model servers that load the files of the weights folder.

`ModelServer` is the client of one server. `ServerList` finds the servers by their URLs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from gristmill import PolicyVersion
from gristmill.internal import connections
from gristmill.internal.receipts import UNPROVEN
from gristmill.model_servers import ServerAddresses, find_all
from gristmill_trainer.errors import PublishError

_LOG = logging.getLogger(__name__)

# Seconds per call. Loading reads the whole model from disk.
CALL_TIMEOUT = 30.0
LOAD_TIMEOUT = 600.0
_CONNECT_TIMEOUT = 5.0
_ALIVE_TIMEOUT = 10.0
"""For the check before a publication that the server answers. A process that hangs accepts connections."""
PUBLISH = "/gristmill/publish"
SLEEP = "/gristmill/sleep"
Patience = float | Callable[[], float]
"""Seconds to wait for servers that do not answer, or a function that returns them: a stop request shortens the wait."""


def seconds(patience: Patience) -> float:
    return patience() if callable(patience) else patience


class ModelServer:
    """Client of one server. Every call has a time-out; a failed call raises PublishError with its method and path."""

    def __init__(self, url: str, token: str = "", patience: Patience = 600.0) -> None:
        """`token`: needed only for `publish`. `patience`: for an unresponsive server, as during its restart."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self._patience = patience
        self._http = connections.client(self.url, timeout=CALL_TIMEOUT)
        if token:
            self.authorize(token)

    def authorize(self, token: str) -> None:
        """Sends `token` with all later calls."""
        self._http.headers["Authorization"] = f"Bearer {token}"

    @property
    def patience(self) -> float:
        """Seconds to wait for a server that does not answer."""
        return seconds(self._patience)

    def first_model(self) -> dict[str, Any]:
        """Returns the first model of /v1/models. Raises PublishError at once if the server does not answer."""
        answer = self.call("GET", "/v1/models")
        with self._understanding("GET", "/v1/models"):
            first = dict(answer.json()["data"][0])
            first["id"] = str(first["id"])
            if first.get("max_model_len") is not None:
                first["max_model_len"] = int(first["max_model_len"])
        return first

    def call(self, method: str, path: str, *, timeout: float = CALL_TIMEOUT, **request: Any) -> httpx.Response:
        """Sends one request. Raises PublishError for a time-out and for any error status."""
        try:
            waits = httpx.Timeout(timeout, connect=min(timeout, _CONNECT_TIMEOUT))
            answer = self._http.request(method, path, timeout=waits, **request)
        except httpx.RequestError as error:
            within = f" within {timeout:.0f} s" if isinstance(error, httpx.TimeoutException) else ""
            raise PublishError(
                "model_server_unreachable",
                f"the model server at {self.url} did not answer {method} {path}{within}: "
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
        self.call("GET", "/weight_info", timeout=_ALIVE_TIMEOUT)
        body = {"path": str(path), "version": str(version)}
        answer = self.ask("POST", PUBLISH, "weight_version", timeout=LOAD_TIMEOUT, json=body)
        if answer != str(version):
            raise PublishError(
                "other_version_served",
                f"published version {version}, but the model server at {self.url} says {answer}",
                url=self.url,
                version=str(version),
                served=answer,
            )

    def sleep(self, level: int) -> None:
        """Lets vLLM free its memory on the GPU until the next publication. `level`: 1 or 2, as vLLM's.

        Raises PublishError.
        """
        self.call("POST", SLEEP, timeout=LOAD_TIMEOUT, json={"level": level})

    def weight_sums(self) -> list[dict[str, tuple[str, int]]]:
        """Returns dtype and sum of each tensor, by name, from each worker of the server (receipts/sums.py).

        Raises PublishError, with a status if the server does not have this method.
        """
        method, path = "POST", "/collective_rpc"
        workers = self.ask(method, path, "results", timeout=LOAD_TIMEOUT, json={"method": "weight_sums"})
        with self._understanding(method, path):
            return [{name: (str(row[0]), int(row[1])) for name, row in worker.items()} for worker in workers]

    def leave_out(self) -> None:
        """Labels the served weights `UNPROVEN`, until the next publication. Raises PublishError."""
        self.call("POST", "/update_weight_version", json={"new_version": UNPROVEN})

    @contextmanager
    def _understanding(self, method: str, path: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            raise PublishError(
                "not_a_model_server",
                f"{self.url} answers {method} {path}, but not as a model server does ({error!r}); something else may "
                "be in its place",
                url=self.url,
                request=f"{method} {path}",
            ) from error


class ServerList:
    """The servers of the trainer's URLs, found again whenever `look_up` is called. Only one thread may call it."""

    def __init__(self, urls: Sequence[str], patience: Patience = 600.0) -> None:
        """`urls`: as in gristmill.model_servers. `patience`: for each server, and for `served`. Raises ConfigError."""
        self._names = [ServerAddresses(url) for url in urls]
        self._patience = patience
        self._token = ""
        self._clients: dict[str, ModelServer] = {}
        self._current: tuple[ModelServer, ...] = ()
        self.look_up()

    @property
    def may_change(self) -> bool:
        return any(name.by_name for name in self._names)

    def __iter__(self) -> Iterator[ModelServer]:
        return iter(self._current)

    def look_up(self) -> Sequence[ModelServer]:
        """Returns the clients of all servers that the names have now. A server keeps its client."""
        for url in (found := find_all(self._names)):
            if url not in self._clients:
                self._clients[url] = ModelServer(url, self._token, self._patience)
        self._current = tuple(self._clients[url] for url in found)
        return self._current

    def authorize(self, token: str) -> None:
        """Sends `token` with all later calls, also to servers that join later."""
        self._token = token
        for server in self._clients.values():
            server.authorize(token)

    def served(self) -> dict[str, Any]:
        """Returns the first model of the first server that answers. Repeats for at most the patience.

        Raises PublishError with the last problem.
        """
        named = ", ".join(name.url for name in self._names)
        started = time.monotonic()
        logged = False
        while True:
            problem = PublishError(
                "no_model_server", f"{named} has no address; is the model service running?", url=named
            )
            for server in self.look_up():
                try:
                    return server.first_model()
                except PublishError as error:
                    if error.permanent:
                        raise
                    problem = error
            spent = time.monotonic() - started
            if spent > seconds(self._patience):
                raise problem.given_up(spent) from problem
            if not logged:
                _LOG.info("waiting for the model server at %s", named)
                logged = True
            time.sleep(1.0)
