"""The model servers that load the files of the weights folder.

`ModelServer` is the client of one server. `ModelServers` gives each server its own thread, so that no server waits for
another. The trainer waits at most for its patience.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx

from gristmill import PolicyVersion
from gristmill.receipts import UNPROVEN
from gristmill_trainer.errors import PublishError

_LOG = logging.getLogger(__name__)

# Seconds per call. Loading reads the whole model from disk.
CALL_TIMEOUT = 30.0
LOAD_TIMEOUT = 600.0
# Seconds between two attempts at a server that does not answer or did not load the weights.
_PAUSE = 0.5
RECEIPT_FAILED = "receipt_failed"
"""Code of the error that `Proof.explain` returns."""


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
        logged = False
        while True:
            try:
                return self.call(method, path)
            except PublishError as error:
                if error.permanent:
                    raise
                spent = time.monotonic() - started
                if spent > self.patience:
                    raise error.given_up(spent) from error
                if not logged:
                    _LOG.info("waiting for the model server at %s", self.url)
                    logged = True
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

    def leave_out(self) -> None:
        """Labels the served weights `UNPROVEN`, until the next publication. Raises PublishError."""
        self.call("POST", "/update_weight_version", json={"new_version": UNPROVEN})

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


class Proof(Protocol):
    """Checks after a publication that a server computes with the published weights (receipts/)."""

    def expects(self, version: PolicyVersion) -> bool:
        """Whether the version can be checked."""

    def holds(self, server: ModelServer, version: PolicyVersion, attempt: int) -> bool:
        """Whether the server computes with the weights of `version`. `attempt`: of its publication, from 1.

        Raises PublishError if the server does not answer.
        """

    def explain(self, server: ModelServer, path: Path, label: str) -> PublishError:
        """Returns the error of a server for which `holds` was False. `path`: of the published weights; `label`: of
        the server's weights."""


@dataclass
class _Standing:
    """State of one server, guarded by `ModelServers._changed`."""

    server: ModelServer
    served: PolicyVersion | None = None
    check_due: bool = False
    """Whether to check that the server still serves this version."""
    problem: PublishError | None = None
    """Why the last attempt failed; None if the version is served or was not tried yet."""
    away_since: float | None = None
    proven: PolicyVersion | None = None
    """The newest version that was checked."""
    left_out: PolicyVersion | None = None
    """The version that the server does not serve, although it was published to it twice."""


class ModelServers:
    """Loads every publication into all servers at once.

    A server may be killed at any point and restart with its first weights. The thread of an unreachable server keeps
    trying, and publishes the newest weights after the restart. Meanwhile the other servers serve their weights.
    """

    def __init__(
        self,
        servers: Sequence[ModelServer],
        *,
        wait_for_all: bool = True,
        closing: Callable[[], float] = lambda: 1.0,
        proof: Proof | None = None,
    ) -> None:
        """`wait_for_all`: `load` returns only when every server has the version, as a synchronous run needs.
        Otherwise `load` returns when every server that answers has the version, and at least one. `closing`: seconds
        that `close` may wait for a server that is loading. `proof`: checks each publication. A server that fails the
        check twice is left out until the next version."""
        self._proof = proof
        self._wait_for_all = wait_for_all
        self._closing = closing
        self._standings = [_Standing(server) for server in servers]
        self._wanted: tuple[Path, PolicyVersion] | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._follow, args=(standing,), name=f"publish-{number}", daemon=True)
            for number, standing in enumerate(self._standings)
        ]
        for thread in self._threads:
            thread.start()

    def load(self, path: Path, version: PolicyVersion) -> None:
        """Returns when the weights in `path` are served as `version`.

        A second call with the same version only checks it, if `proof` expects the version since the first call. Raises
        PublishError if a server refuses, if a server takes longer than its patience to answer or to load, or if no
        server is left that serves the version.
        """
        with self._changed:
            self._wanted, since = (path, version), time.monotonic()
            self._changed.notify_all()
            while not self._enough(version, since):
                self._changed.wait(timeout=1.0)  # A stop request shortens the patience without a notification.

    def ensure(self) -> None:
        """Requests a check of each server's version, and publishes again to a server that lost it.

        Does not wait for the servers. Raises PublishError if a server refused, or if all servers are unreachable and
        one of them for longer than its patience.
        """
        with self._changed:
            self._raise_what_is_permanent()
            if all(standing.away_since is not None for standing in self._standings):
                for standing in self._standings:
                    self._raise_if_late(standing, time.monotonic())
            for standing in self._standings:
                standing.check_due = standing.served is not None
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the threads. A load in progress may finish within the grace period."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        deadline = time.monotonic() + self._closing()
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))

    def _enough(self, version: PolicyVersion, since: float) -> bool:
        """Whether enough servers have the version. Needs the lock. Raises errors that further waiting cannot fix."""
        self._raise_what_is_permanent()
        left_out = [standing for standing in self._standings if standing.left_out == version]
        if len(left_out) == len(self._standings) and left_out[0].problem is not None:
            raise left_out[0].problem
        missing = [
            standing
            for standing in self._standings
            if standing.left_out != version and (standing.served != version or self._unproven(standing, version))
        ]
        served = len(missing) + len(left_out) < len(self._standings)
        if not missing:
            return True
        if served and not self._wait_for_all:
            return all(standing.problem is not None for standing in missing)
        for standing in missing:
            self._raise_if_late(standing, since)
        return False

    def _raise_what_is_permanent(self) -> None:
        for standing in self._standings:
            if standing.problem is not None and standing.problem.permanent:
                raise standing.problem

    def _raise_if_late(self, standing: _Standing, since: float) -> None:
        """Raises PublishError for a server beyond its patience. `since`: start of the wait.

        If the server was already unreachable before, the time counts from then.
        """
        spent = time.monotonic() - min(since, standing.away_since or since)
        if spent <= standing.server.patience:
            return
        if standing.problem is None and not self._wait_for_all and self._closing() > 0:
            return  # The server is loading in the background, and the trainer does not wait for it.
        if standing.problem is not None:
            raise standing.problem.given_up(spent)
        url = standing.server.url
        loading = PublishError("model_server_loading", f"the model server at {url} is still loading", url=url)
        raise loading.given_up(spent)

    def _follow(self, standing: _Standing) -> None:
        """Keeps one server at the newest version."""
        while True:
            with self._changed:
                while not self._closed and not self._work_for(standing):
                    self._changed.wait()
                if self._closed or self._wanted is None:
                    return
                (path, version), standing.check_due = self._wanted, False
                there = standing.served == version
                proof = self._proof if not there or self._unproven(standing, version) else None
                if proof is not None and not proof.expects(version):
                    proof = None
            problem, served = _attempt(standing.server, path, version, proof, there=there)
            with self._changed:
                standing.served, standing.problem = served, problem
                if problem is None:
                    standing.away_since = None
                    if served is not None and proof is not None:
                        standing.proven = version
                elif problem.code == RECEIPT_FAILED:
                    standing.left_out = version
                    self._changed.notify_all()
                    continue
                elif standing.away_since is None:
                    standing.away_since = time.monotonic()
                    _LOG.warning("publishing version %s: %s; trying again", version, problem)
                self._changed.notify_all()
                if problem is not None:
                    if problem.permanent:
                        return
                    self._changed.wait_for(lambda: self._closed, timeout=_PAUSE)

    def _work_for(self, standing: _Standing) -> bool:
        if self._wanted is None or standing.left_out == self._wanted[1]:
            return False
        version = self._wanted[1]
        return standing.check_due or standing.served != version or self._unproven(standing, version)

    def _unproven(self, standing: _Standing, version: PolicyVersion) -> bool:
        """Whether the version can be checked on the server, and was not."""
        return self._proof is not None and standing.proven != version and self._proof.expects(version)


def _attempt(
    server: ModelServer, path: Path, version: PolicyVersion, proof: Proof | None, *, there: bool
) -> tuple[PublishError | None, PolicyVersion | None]:
    """Checks the label of a version that was loaded before (`there`), else loads it; then asks for the `proof`.

    Returns a problem or None, and the version that the server serves now.
    """
    try:
        if not there:
            server.publish(path, version)
        elif server.served_version() != str(version):
            _LOG.warning(
                "the model server at %s no longer serves version %s (was it restarted?): publishing again",
                server.url,
                version,
            )
            return None, None
        problem = None if proof is None else _prove(server, path, version, proof)
        if problem is not None:
            return problem, None
    except PublishError as error:
        return error, None
    except Exception as error:  # noqa: BLE001  Raised by `load` and `ensure`: they would wait for ever.
        failure = PublishError(
            "unexpected_error",
            f"{server.url} took no weights: {type(error).__name__}: {error}",
            permanent=True,
            url=server.url,
            error=type(error).__name__,
        )
        failure.__cause__ = error
        return failure, None
    return None, version


def _prove(server: ModelServer, path: Path, version: PolicyVersion, proof: Proof) -> PublishError | None:
    """Returns None if the server serves the version, if necessary after a second publication; else leaves it out."""
    for attempt in (1, 2):
        if proof.holds(server, version, attempt):
            return None
        label = server.served_version()
        server.leave_out()
        problem = proof.explain(server, path, label)
        if attempt == 1:
            server.publish(path, version)
    return problem
