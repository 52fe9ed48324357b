"""Loads every publication into all model servers. The trainer waits at most for the servers' patience."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from gristmill import GristmillError, PolicyVersion
from gristmill.errors import of_thread
from gristmill.internal.logs import line
from gristmill.model_servers import LOOK_UP_EVERY
from gristmill_trainer.errors import PublishError
from gristmill_trainer.publish.reconcile import Action, ActionResult, ServerState, Target
from gristmill_trainer.publish.servers import PUBLISH, ModelServer

_LOG = logging.getLogger(__name__)
_OTHERS_TIMES, _OTHERS_LEAST = 3.0, 30.0
"""Once one server has the weights, a publication waits for the others until this many times the seconds of its load
have passed, and at least so many seconds. A server may hang in a load."""
_REPLACED = 409
"""HTTP status of a refusal because another trainer publishes now."""
_WAKING = 60.0
"""Most seconds that the end of a training waits until its servers are awake."""


class Proof(Protocol):
    """Checks after a publication that a server computes with the published weights (receipts/)."""

    def expects(self, version: PolicyVersion) -> bool:
        """Whether the version can be checked."""

    def check(self, server: ModelServer, version: PolicyVersion, attempt: int) -> PublishError | None:
        """Returns None if the server computes with the weights of `version`. Else leaves the server out, and returns
        its error with the code `RECEIPT_FAILED`. `attempt`: of its publication, from 1.

        Raises PublishError if the server does not answer.
        """


@dataclass(eq=False)
class _Member:
    """One server of the pool, guarded by `ModelServers._changed`."""

    server: ModelServer
    essential: bool
    """Whether a refusal ends the training: the server was there before the first publication and has not loaded it."""
    state: ServerState = field(default_factory=ServerState)
    loaded: Path | None = None
    """Folder of the last load. A server whose next load fails reads it again."""
    asked: Path | None = None
    """The oldest folder that the server was asked to load and gave no answer for. It may still read the folder, also
    after the request timed out."""


class ModelServers:
    """Loads every publication into all servers at once.

    Each server has a thread that carries out the actions of reconcile.py, so that no server waits for another. A server
    may be killed at any point and restart with its first weights. Its thread keeps trying, and publishes the newest
    weights after the restart. With `look_up`, servers may also join and leave.
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
        self._members: list[_Member] = []
        self._target: Target | None = None
        self._fastest = float("inf")
        """Seconds of the fastest load of the target version."""
        self._failure: GristmillError | None = None
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
        with self._changed:
            return [member.server for member in self._members]

    @property
    def in_use(self) -> set[Path]:
        """The folders that servers load, or may load again."""
        with self._changed:
            paths = [path for member in self._members for path in (member.asked, member.loaded)]
        return {path for path in paths if path is not None}

    def load(self, path: Path, version: PolicyVersion) -> None:
        """Returns when every server that answers serves the weights in `path` as `version`, and at least one does.

        A server that does not answer, or takes much longer than the others, is left out, and gets the newest version
        later. The threads of the servers then ask for the proofs; `prove` waits for them. Raises PublishError if no
        server answers or loads within its patience, if no server is left that serves the version, if a server refuses
        the first publication or this trainer, or if all servers refuse.
        """
        with self._changed:
            if self._target is None or self._target.version != version:
                self._fastest = float("inf")
                for member in self._members:
                    member.essential = member.essential and self._target is None
            self._target = Target(path, version, self._proof is not None and self._proof.expects(version))
            self._changed.notify_all()
            self._wait(version, proven=False)

    def sleep(self, level: int) -> None:
        """Returns when every server that answers sleeps, until the next `load` or `wake`. `level`: 1 or 2, as vLLM's.

        Call it after `load`. A server that does not answer is left awake, and sleeps as soon as it has the version.
        """
        with self._changed:
            assert self._target is not None
            self._target = replace(self._target, sleep=level)
            self._changed.notify_all()
            since = time.monotonic()
            while self._failure is None and any(
                not one.state.asleep and one.state.away_since is None and not self._is_late(one, since)
                for one in self._members
            ):
                self._changed.wait(timeout=1.0)  # A stop request shortens the patience without a notification.
            if self._failure is not None:
                raise self._failure

    def wake(self) -> Sequence[str]:
        """Ends a sleep: the servers load the last version again. Returns when all do, or after _WAKING seconds.

        Returns the URLs of the servers that did not.
        """
        with self._changed:
            if self._target is None or not self._target.sleep:
                return []
            self._target = target = replace(self._target, sleep=0)
            self._changed.notify_all()
            since = time.monotonic()
            while any(
                not one.state.ready(target.version, proven=False)
                and (one.state.problem is None or one.state.problem is not self._failure)  # else its thread has ended
                and not self._is_late(one, since, _WAKING)
                for one in self._members
            ):
                self._changed.wait(timeout=1.0)
            return [one.server.url for one in self._members if not one.state.ready(target.version, proven=False)]

    @staticmethod
    def _is_late(member: _Member, since: float, most: float = float("inf")) -> bool:
        return time.monotonic() - since > min(member.server.patience, most)

    def prove(self) -> None:
        """Returns when each server that answers has proven the last version that was loaded, and at least one has.

        Returns at once if `proof` does not expect the version. Raises PublishError like `load`, and if every server
        failed the check twice.
        """
        with self._changed:
            self._ask_for_proofs()
            if self._target is not None:
                self._wait(self._target.version, proven=self._target.provable)

    def ensure(self) -> None:
        """Requests a check of each server's version, and publishes again to a server that lost it.

        Does not wait for the servers. Raises PublishError if servers refused as in `load`, if every server is left
        out, or if all servers that are not have been unreachable for longer than their patience.
        """
        with self._changed:
            here, now = self._here(), time.monotonic()
            if all(member.state.away_since is not None for member in here):
                self._raise_if_all_late(here, now)
            self._ask_for_proofs()
            self._check_all(now)

    def close(self) -> None:
        """Ends the threads. A load in progress may finish within the grace period."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        deadline = time.monotonic() + self._closing()
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))

    # --- What the trainer waits for. All of it needs the lock ---------------------------------------------------------
    def _ask_for_proofs(self) -> None:
        """Lets the servers prove the target version if `proof` expects it only since its load."""
        target = self._target
        if target is None or target.provable or self._proof is None or not self._proof.expects(target.version):
            return
        self._target = replace(target, provable=True)
        self._check_all(time.monotonic())  # A server may have been restarted since its load.

    def _check_all(self, now: float) -> None:
        for member in self._members:
            member.state = member.state.check_at(now)
        self._changed.notify_all()

    def _wait(self, version: PolicyVersion, *, proven: bool) -> None:
        """Waits until enough servers serve the version, and have proven it if `proven`."""
        since = time.monotonic()
        while not self._enough(version, since, proven=proven):
            self._changed.wait(timeout=1.0)  # A stop request shortens the patience without a notification.

    def _enough(self, version: PolicyVersion, since: float, *, proven: bool) -> bool:
        """Whether enough servers have the version. Raises errors that further waiting cannot fix."""
        here = self._here()
        missing = [member for member in here if not member.state.ready(version, proven=proven)]
        if len(missing) == len(here):
            self._raise_if_all_late(missing, since)
            return False
        waiting = [member for member in missing if member.state.away_since is None]
        now = time.monotonic()
        if (spent := now - since) > max(_OTHERS_LEAST, _OTHERS_TIMES * self._fastest):
            for member in waiting:
                problem = f"not ready after {spent:.0f} s, and another server was after {self._fastest:.0f} s"
                self._set(member, member.state.behind(now), version, problem)
            return True
        return all(self._late(member, since) is not None for member in waiting)

    def _here(self) -> list[_Member]:
        """Returns the servers that are not left out. Raises errors that further waiting cannot fix."""
        if self._failure is not None:
            raise self._failure
        target = self._target
        here = [one for one in self._members if target is None or not one.state.left_out(target.version)]
        problems = [member.state.problem for member in here or self._members]
        if problems[0] is not None and all(one is not None and (one.permanent or not here) for one in problems):
            raise problems[0]
        return here

    def _raise_if_all_late(self, members: Sequence[_Member], since: float) -> None:
        errors = [self._late(member, since) for member in members]
        if errors[0] is not None and None not in errors:
            raise errors[0]

    def _late(self, member: _Member, since: float) -> PublishError | None:
        """Returns the error of a server beyond its patience, else None. `since`: start of the wait.

        If the server was already unreachable before, the time counts from then.
        """
        state, server = member.state, member.server
        spent = time.monotonic() - min(since, state.away_since or since)
        if spent <= server.patience:
            return None
        if state.problem is not None:
            return state.problem.given_up(spent)
        if self._background and self._closing() > 0:
            return None  # The server is loading in the background, and the trainer does not wait for it.
        url = server.url
        loading = PublishError("model_server_loading", f"the model server at {url} is still loading", url=url)
        return loading.given_up(spent)

    # --- The threads --------------------------------------------------------------------------------------------------
    def _start(self, work: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _join(self, server: ModelServer) -> None:
        """Starts to keep a server at the newest version. Needs the lock."""
        member = _Member(server, essential=self._target is None)
        self._members.append(member)
        self._start(lambda: self._keep(member), f"publish-{server.url}")

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
                known = {member.server for member in self._members}
                for server in found:
                    if server not in known:
                        _LOG.info("%s", line("model server", state="joined", url=server.url))
                        self._join(server)
                for member in list(self._members):
                    # A name server may forget a server that still runs. The last server stays, so that errors name it.
                    leaves = member.server not in found and member.state.away_since is not None
                    if leaves and len(self._members) > 1:
                        _LOG.info("%s", line("model server", state="left", url=member.server.url))
                        self._members.remove(member)
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed, timeout=LOOK_UP_EVERY)

    def _keep(self, member: _Member) -> None:
        """Carries out the actions for one server, until it leaves, ends the training, or the pool closes."""
        with self._changed:
            while (action := self._next_action(member)) is not Action.REST:
                target, asked, began = self._target, member.asked, time.monotonic()
                assert target is not None
                member.state = member.state.begun(action)
                if action is Action.LOAD:
                    member.asked = asked or target.path
                self._changed.release()
                try:
                    outcome = self._carry_out(action, member.server, target)
                finally:
                    self._changed.acquire()
                now = time.monotonic()
                if action is Action.LOAD:
                    self._note_load(member, target, outcome, asked, now - began)
                state = member.state.after(action, target.version, outcome, now)
                self._set(member, state, target.version, problem=outcome)
                if isinstance(outcome, PublishError) and _ends_training(outcome, member):
                    self._failure = self._failure or outcome
                self._changed.notify_all()

    def _next_action(self, member: _Member) -> Action:
        """Waits for an action. Returns REST if there will be none any more. Needs the lock."""
        while not self._closed and member in self._members:
            state, now = member.state, time.monotonic()
            if state.problem is not None and state.problem is self._failure:
                break
            if self._target is not None and (action := state.next_action(self._target, now)) is not Action.REST:
                return action
            self._changed.wait(state.seconds_of_rest(now))
        return Action.REST

    def _note_load(
        self, member: _Member, target: Target, outcome: ActionResult, asked: Path | None, seconds: float
    ) -> None:
        """Notes which folders the server may read after a load. `asked`: `member.asked` before. Needs the lock."""
        if not isinstance(outcome, PublishError):
            member.loaded, member.asked, member.essential = target.path, None, False
            if self._target is not None and self._target.version == target.version:
                self._fastest = min(self._fastest, seconds)
        elif outcome.values.get("request") != f"POST {PUBLISH}":
            member.asked = asked
        elif outcome.code != "model_server_unreachable":
            member.asked = None  # Servers answer in order: an answer to this request ends the earlier requests too.

    def _set(self, member: _Member, state: ServerState, version: PolicyVersion, problem: object) -> None:
        """Sets a server's state, and logs if the run continues without the server or with it again. Needs the lock."""
        before, member.state, url = member.state, state, member.server.url
        if before.away_since is None and state.away_since is not None:
            remedy = "it gets the newest version when it answers"
            text = line("model server", state="away", url=url, version=version, problem=problem, remedy=remedy)
            _LOG.warning("%s", text)
        elif before.away_since is not None and state.away_since is None:
            _LOG.info("%s", line("model server", state="up", url=url, version=version))

    # --- Requests, without the lock -----------------------------------------------------------------------------------
    def _carry_out(self, action: Action, server: ModelServer, target: Target) -> ActionResult:
        try:
            if action is Action.LOAD:
                server.publish(target.path, target.version)
            elif action is Action.PROVE:
                return self._prove(server, target)
            elif action is Action.SLEEP:
                self._let_sleep(server, target.sleep)
            elif server.served_version() != str(target.version):
                _LOG.warning(
                    "the model server at %s no longer serves version %s (was it restarted?): publishing again",
                    server.url,
                    target.version,
                )
                return None
        except PublishError as error:
            return error
        except Exception as error:  # noqa: BLE001  Raised by `load` and `ensure`: they would wait for ever.
            failure = PublishError(
                "unexpected_error",
                f"{server.url} took no weights: {type(error).__name__}: {error}",
                permanent=True,
                url=server.url,
                error=type(error).__name__,
            )
            failure.__cause__ = error
            return failure
        return target.version

    def _let_sleep(self, server: ModelServer, level: int) -> None:
        """A server that refuses counts as asleep, because the next load wakes whatever sleeps then."""
        try:
            server.sleep(level)
        except PublishError as error:
            if error.code != "model_server_refused" or error.values.get("status") in (401, _REPLACED):
                raise
            _LOG.warning("the model server at %s keeps its memory on the GPU during the step: %s", server.url, error)

    def _prove(self, server: ModelServer, target: Target) -> ActionResult:
        """Asks for the proof, if necessary again after a second publication. Leaves the server out without it."""
        assert self._proof is not None
        if self._proof.check(server, target.version, 1) is None:
            return target.version
        server.publish(target.path, target.version)
        return self._proof.check(server, target.version, 2) or target.version


def _ends_training(problem: PublishError, member: _Member) -> bool:
    """Whether a server's problem ends the training although others serve.

    A server that refuses later, because a wrong one replaced it, does not.
    """
    if not problem.permanent:
        return False
    if problem.code != "model_server_refused" or problem.values.get("status") == _REPLACED:
        return True
    return member.essential
