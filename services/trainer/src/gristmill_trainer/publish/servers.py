"""The model servers that load the files of the weights folder.

`ModelServer` is the client of one server. `ServerList` finds the servers by their URLs. `ModelServers` gives each
server its own thread, so that no server waits for another. The trainer waits at most for its patience.
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

from gristmill import GristmillError, PolicyVersion, connections
from gristmill.errors import of_thread
from gristmill.logs import line
from gristmill.model_servers import LOOK_UP_EVERY, ServerAddresses, find_all
from gristmill.receipts import UNPROVEN
from gristmill_trainer.errors import PublishError

_LOG = logging.getLogger(__name__)

# Seconds per call. Loading reads the whole model from disk.
CALL_TIMEOUT = 30.0
LOAD_TIMEOUT = 600.0
_CONNECT_TIMEOUT = 5.0
_ALIVE_TIMEOUT = 10.0
"""For the check before a publication that the server answers. A process that hangs accepts connections."""
# Seconds between two attempts at a server that does not answer or did not load the weights.
_PAUSE = 0.5
_OTHERS_TIMES, _OTHERS_LEAST = 3.0, 30.0
"""Once one server has the weights, a publication waits for the others until this many times its seconds have passed,
and at least so many seconds. A server may hang in a load."""
_REPLACED = 409
"""HTTP status of a refusal because another trainer publishes now."""
_PUBLISH = "/gristmill/publish"
RECEIPT_FAILED = "receipt_failed"
"""Code of the error that `Proof.explain` returns."""


class ModelServer:
    """Client of one server. Every call has a time-out; a failed call raises PublishError with its method and path."""

    def __init__(self, url: str, token: str = "", patience: float | Callable[[], float] = 600.0) -> None:
        """`token`: needed only for `publish`. `patience`: seconds to wait for an unresponsive server, as during its
        restart, or a function that returns them."""
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
        return self._patience() if callable(self._patience) else self._patience

    def served(self) -> dict[str, Any]:
        """Returns the first model of /v1/models. Waits for at most `patience` seconds until the server answers.

        Raises PublishError.
        """
        return first_answer(lambda: [self], self.url, lambda: self.patience)

    def first_model(self) -> dict[str, Any]:
        """Returns the first model of /v1/models. Raises PublishError at once if the server does not answer."""
        answer = self.call("GET", "/v1/models")
        with self._understanding("GET", "/v1/models"):
            first: dict[str, Any] = answer.json()["data"][0]
        return first

    def call(self, method: str, path: str, *, timeout: float = CALL_TIMEOUT, **request: Any) -> httpx.Response:
        """Sends one request. Raises PublishError for a time-out and for any error status."""
        try:
            waits = httpx.Timeout(timeout, connect=min(timeout, _CONNECT_TIMEOUT))
            answer = self._http.request(method, path, timeout=waits, **request)
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
        self.call("GET", "/weight_info", timeout=_ALIVE_TIMEOUT)
        body = {"path": str(path), "version": str(version)}
        found = self.ask("POST", _PUBLISH, "weight_version", timeout=LOAD_TIMEOUT, json=body)
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


def first_answer(
    servers: Callable[[], Sequence[ModelServer]], named: str, patience: Callable[[], float]
) -> dict[str, Any]:
    """Returns `first_model` of the first of `servers` that answers. Repeats for at most `patience` seconds.

    `named`: the servers, for messages. Raises PublishError with the last problem.
    """
    started = time.monotonic()
    logged = False
    while True:
        problem = PublishError("no_model_server", f"{named} has no address; is the model service running?", url=named)
        for server in servers():
            try:
                return server.first_model()
            except PublishError as error:
                if error.permanent:
                    raise
                problem = error
        spent = time.monotonic() - started
        if spent > patience():
            raise problem.given_up(spent) from problem
        if not logged:
            _LOG.info("waiting for the model server at %s", named)
            logged = True
        time.sleep(1.0)


class ServerList:
    """The servers of the trainer's URLs, found again whenever `look_up` is called. Only one thread may call it."""

    def __init__(self, urls: Sequence[str], patience: float | Callable[[], float] = 600.0) -> None:
        """`urls`: as in gristmill.model_servers. `patience`: as in `ModelServer`. Raises ConfigError."""
        self._names = [ServerAddresses(url) for url in urls]
        self._patience = patience
        self._token = ""
        self._clients: dict[str, ModelServer] = {}
        self._current: tuple[ModelServer, ...] = ()
        self.look_up()

    @property
    def may_change(self) -> bool:
        """Whether servers can join or leave."""
        return any(name.by_name for name in self._names)

    def __iter__(self) -> Iterator[ModelServer]:
        """Iterates over the servers of the last look-up."""
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
        """Returns the first model of the first server that answers. Raises PublishError after its patience."""
        patience = self._patience
        named = ", ".join(name.url for name in self._names)
        return first_answer(self.look_up, named, patience if callable(patience) else lambda: patience)


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
    seconds: float = 0.0
    """Duration of the last load."""
    loading: Path | None = None
    """The oldest folder that the server was asked to load and gave no answer for. It may still read the folder, also
    after the request timed out."""
    loaded: Path | None = None
    """Folder of the last load. A server whose next load fails reads it again."""
    behind: bool = False
    """Whether the present attempt takes so long that no publication waits for the server."""
    late: bool = False
    """Whether the server joined after the first publication."""
    proven: PolicyVersion | None = None
    """The newest version that was checked."""
    left_out: PolicyVersion | None = None
    """The version that the server does not serve, although it was published to it twice."""
    gone: bool = False
    """Whether the server has left: its thread ends."""


class ModelServers:
    """Loads every publication into all servers at once.

    A server may be killed at any point and restart with its first weights. The thread of an unreachable server keeps
    trying, and publishes the newest weights after the restart. Meanwhile the other servers serve their weights. With
    `look_up`, servers may also join and leave.
    """

    def __init__(
        self,
        servers: Sequence[ModelServer],
        *,
        look_up: Callable[[], Sequence[ModelServer]] | None = None,
        background: bool = False,
        closing: Callable[[], float] = lambda: 1.0,
        proof: Proof | None = None,
    ) -> None:
        """`servers`: at least one. `look_up`: returns the servers that exist now; called every LOOK_UP_EVERY seconds. A
        server that it no longer returns leaves once it does not answer. `background`: no step waits for `load`, so a
        load may use the rest of the grace period. `closing`: seconds that `close` may wait for a server that is
        loading. `proof`: checks each publication. A server that fails the check twice is left out until the next
        version."""
        self._proof = proof
        self._background = background
        self._closing = closing
        self._standings: list[_Standing] = []
        self._wanted: tuple[Path, PolicyVersion] | None = None
        self._first: PolicyVersion | None = None
        """The version of the first publication."""
        self._failure: GristmillError | None = None
        """The error that ended a thread."""
        self._closed = False
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        with self._changed:
            for server in servers:
                self._join(server)
        if look_up is not None:
            self._start(lambda: self._look_again(look_up), "find-servers")

    @property
    def servers(self) -> Sequence[ModelServer]:
        """The servers that receive publications."""
        with self._changed:
            return [standing.server for standing in self._standings]

    @property
    def in_use(self) -> set[Path]:
        """The folders that servers load, or may load again."""
        with self._changed:
            paths = [(standing.loading, standing.loaded) for standing in self._standings]
        return {path for pair in paths for path in pair if path is not None}

    def load(self, path: Path, version: PolicyVersion) -> None:
        """Returns when every server that answers serves the weights in `path` as `version`, and at least one does.

        A server that does not answer, or takes much longer than the others, is left out, and gets the newest version
        later. The threads of the servers then ask for the proofs; `prove` waits for them. Raises PublishError if no
        server answers or loads within its patience, if no server is left that serves the version, if a server refuses
        the first publication or this trainer, or if all servers refuse.
        """
        with self._changed:
            self._wanted, self._first = (path, version), self._first or version
            for standing in self._standings:
                if standing.left_out not in (None, version):
                    standing.left_out = standing.problem = None
            self._changed.notify_all()
            self._wait(version, proven=False)

    def prove(self) -> None:
        """Returns when every server that answers has proven the last version that was loaded, and at least one has.

        Returns at once if `proof` does not expect the version. Raises PublishError like `load`, and if every server
        failed the check twice.
        """
        with self._changed:
            if self._wanted is not None:
                self._changed.notify_all()  # `proof` may expect the version only since its load.
                self._wait(self._wanted[1], proven=True)

    def ensure(self) -> None:
        """Requests a check of each server's version, and publishes again to a server that lost it.

        Does not wait for the servers. Raises PublishError if servers refused as in `load`, if every server is left
        out, or if all servers that are not have been unreachable for longer than their patience.
        """
        with self._changed:
            self._raise_what_is_permanent()
            if self._wanted is not None:
                self._raise_if_none_is_left(self._wanted[1])
            here = [one for one in self._standings if self._wanted is None or one.left_out != self._wanted[1]]
            if here and all(standing.away_since is not None for standing in here):
                self._raise_if_all_late(here, time.monotonic())
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

    def _join(self, server: ModelServer) -> None:
        """Starts to keep a server at the newest version. Needs the lock."""
        standing = _Standing(server, late=self._wanted is not None)
        self._standings.append(standing)
        self._start(lambda: self._follow(standing), f"publish-{server.url}")

    def _start(self, work: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _look_again(self, look_up: Callable[[], Sequence[ModelServer]]) -> None:
        """Adds the servers that join, and removes those that leave."""
        while True:
            try:
                found = look_up()
            except Exception as error:  # noqa: BLE001  Raised by `load` and `ensure`: servers could join in vain.
                with self._changed:
                    self._failure = of_thread("the look-up of model servers", error)
                return
            with self._changed:
                if self._closed:
                    return
                known = {standing.server for standing in self._standings}
                for server in found:
                    if server not in known:
                        _LOG.info("%s", line("model server", state="joined", url=server.url))
                        self._join(server)
                for standing in list(self._standings):
                    # A name server may forget a server that still runs. The last server stays, so that errors name it.
                    leaves = standing.server not in found and standing.away_since is not None
                    if leaves and len(self._standings) > 1:
                        _LOG.info("%s", line("model server", state="left", url=standing.server.url))
                        standing.gone = True
                        self._standings.remove(standing)
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed, timeout=LOOK_UP_EVERY)

    def _wait(self, version: PolicyVersion, *, proven: bool) -> None:
        """Waits until enough servers serve the version, and have proven it if `proven`. Needs the lock."""
        since = time.monotonic()
        while not self._enough(version, since, proven=proven):
            self._changed.wait(timeout=1.0)  # A stop request shortens the patience without a notification.

    def _enough(self, version: PolicyVersion, since: float, *, proven: bool) -> bool:
        """Whether enough servers have the version. Needs the lock. Raises errors that further waiting cannot fix."""
        self._raise_what_is_permanent()
        self._raise_if_none_is_left(version)
        here = [standing for standing in self._standings if standing.left_out != version]
        missing = [
            standing
            for standing in here
            if standing.served != version or (proven and self._unproven(standing, version))
        ]
        if not missing:
            return True
        if len(missing) == len(here):
            self._raise_if_all_late(missing, since)
            return False
        fastest = min(standing.seconds for standing in here if standing not in missing)
        spent = time.monotonic() - since
        waiting = [standing for standing in missing if standing.problem is None and not standing.behind]
        if spent > max(_OTHERS_LEAST, _OTHERS_TIMES * fastest):
            for standing in waiting:
                standing.behind = True
                problem = f"not ready after {spent:.0f} s, and another server was after {fastest:.0f} s"
                self._leave(standing, version, problem)
            return True
        return all(self._late(standing, since) is not None for standing in waiting)

    def _leave(self, standing: _Standing, version: PolicyVersion, problem: object) -> None:
        """Logs that the run continues without a server. Needs the lock."""
        if standing.away_since is None:
            standing.away_since = time.monotonic()
            url, remedy = standing.server.url, "it gets the newest version when it answers"
            _LOG.warning(
                "%s", line("model server", state="away", url=url, version=version, problem=problem, remedy=remedy)
            )

    def _raise_if_none_is_left(self, version: PolicyVersion) -> None:
        problems = [standing.problem for standing in self._standings if standing.left_out == version]
        if len(problems) == len(self._standings) and problems[0] is not None:
            raise problems[0]

    def _raise_what_is_permanent(self) -> None:
        if self._failure is not None:
            raise self._failure
        wanted = None if self._wanted is None else self._wanted[1]
        problems = [one.problem for one in self._standings if wanted is None or one.left_out != wanted]
        if problems and problems[0] is not None and all(one is not None and one.permanent for one in problems):
            raise problems[0]

    def _ends_training(self, problem: PublishError, standing: _Standing, version: PolicyVersion) -> bool:
        """Whether a server's problem ends the training although others serve. A server that refuses later, because a
        wrong one replaced it, does not. Needs the lock."""
        if not problem.permanent:
            return False
        if problem.code != "model_server_refused" or problem.values.get("status") == _REPLACED:
            return True
        return version == self._first and standing.loaded is None and not standing.late

    def _raise_if_all_late(self, standings: Sequence[_Standing], since: float) -> None:
        errors = [self._late(standing, since) for standing in standings]
        if errors[0] is not None and None not in errors:
            raise errors[0]

    def _late(self, standing: _Standing, since: float) -> PublishError | None:
        """Returns the error of a server beyond its patience, else None. `since`: start of the wait.

        If the server was already unreachable before, the time counts from then.
        """
        spent = time.monotonic() - min(since, standing.away_since or since)
        if spent <= standing.server.patience:
            return None
        if standing.problem is not None:
            return standing.problem.given_up(spent)
        if self._background and self._closing() > 0:
            return None  # The server is loading in the background, and the trainer does not wait for it.
        url = standing.server.url
        loading = PublishError("model_server_loading", f"the model server at {url} is still loading", url=url)
        return loading.given_up(spent)

    def _follow(self, standing: _Standing) -> None:
        """Keeps one server at the newest version."""
        just_loaded = False
        while True:
            with self._changed:
                while not (self._closed or standing.gone or self._work_for(standing)):
                    just_loaded = False
                    self._changed.wait()
                if self._closed or standing.gone or self._wanted is None:
                    return
                (path, version), standing.check_due = self._wanted, False
                there, begins = standing.served == version, False
                if not there:
                    standing.proven = None  # A restarted server has to prove the same version again.
                    begins = standing.loading is None
                    standing.loading = standing.loading or path
                proof = self._proof if there and self._unproven(standing, version) else None
            check, begun = there and not just_loaded, time.monotonic()
            problem, served = _attempt(standing.server, path, version, proof, load=not there, check=check)
            just_loaded = not there and problem is None
            with self._changed:
                standing.served, standing.problem, standing.behind = served, problem, False
                if just_loaded:
                    standing.seconds, standing.loaded, standing.loading = time.monotonic() - begun, path, None
                elif not there and problem is not None:
                    asked = problem.values.get("request") == f"POST {_PUBLISH}"
                    # Servers answer in order: an answer to this request ends the earlier requests too.
                    if (asked and problem.code != "model_server_unreachable") or (begins and not asked):
                        standing.loading = None
                if problem is None:
                    if standing.away_since is not None and served is not None:
                        standing.away_since = None
                        _LOG.info("%s", line("model server", state="up", url=standing.server.url, version=version))
                    if served is not None and proof is not None:
                        standing.proven = version
                elif problem.code == RECEIPT_FAILED:
                    standing.left_out = version
                    self._changed.notify_all()
                    continue
                else:
                    self._leave(standing, version, problem)
                self._changed.notify_all()
                if problem is not None:
                    if self._ends_training(problem, standing, version):
                        self._failure = self._failure or problem
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
    server: ModelServer, path: Path, version: PolicyVersion, proof: Proof | None, *, load: bool, check: bool
) -> tuple[PublishError | None, PolicyVersion | None]:
    """Loads a version, or checks the label of a version that was loaded before; then asks for the `proof`.

    A version is not checked right after its load, because the proof then finds a label that did not change.

    Returns a problem or None, and the version that the server serves now.
    """
    try:
        if load:
            server.publish(path, version)
        elif check and server.served_version() != str(version):
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
