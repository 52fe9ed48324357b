"""The trainer's next action for a model server, as a state machine without servers; then with servers that fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill import PolicyVersion
from gristmill_trainer.errors import PublishError
from gristmill_trainer.publish.pool import ModelServers
from gristmill_trainer.publish.reconcile import PAUSE, RECEIPT_FAILED, Action, ActionResult, ServerState, Target
from gristmill_trainer.publish.servers import ModelServer

NOW = 100.0
OLD, NEW = PolicyVersion(1, 4), PolicyVersion(1, 5)
AWAY = PublishError("model_server_unreachable", "away")
WRONG = PublishError(RECEIPT_FAILED, "other weights")


def _target(version: PolicyVersion, provable: bool = True) -> Target:
    return Target(Path(f"/weights/{version}"), version, provable)


@pytest.mark.parametrize(
    ("state", "provable", "action"),
    [
        (ServerState(), True, Action.LOAD),
        (ServerState(OLD), True, Action.LOAD),
        (ServerState(OLD, proven=True), True, Action.LOAD),
        (ServerState(OLD, away_since=NOW - 9), True, Action.LOAD),
        (ServerState(OLD, due=NOW), True, Action.LOAD),
        (ServerState(NEW), False, Action.REST),
        (ServerState(NEW), True, Action.PROVE),
        (ServerState(NEW, proven=True), True, Action.REST),
        (ServerState(NEW, due=NOW + 1), True, Action.PROVE),
        (ServerState(NEW, due=NOW), True, Action.CHECK),
        (ServerState(NEW, due=NOW), False, Action.CHECK),
        (ServerState(NEW, proven=True, due=NOW), True, Action.CHECK),
        (ServerState(problem=AWAY, away_since=NOW - 9, due=NOW + PAUSE), True, Action.REST),
        (ServerState(problem=AWAY, away_since=NOW - 9, due=NOW), True, Action.LOAD),
        (ServerState(NEW, problem=WRONG, due=NOW), True, Action.REST),
        (ServerState(OLD, problem=WRONG, due=NOW), True, Action.LOAD),
    ],
)
def test_next_action_of_each_state(state: ServerState, provable: bool, action: Action) -> None:
    assert state.next_action(_target(NEW, provable), NOW) is action


@pytest.mark.parametrize(
    ("state", "sleep", "action"),
    [
        (ServerState(OLD), 2, Action.LOAD),
        (ServerState(NEW), 2, Action.SLEEP),
        (ServerState(NEW, proven=True), 2, Action.SLEEP),
        (ServerState(NEW, due=NOW), 2, Action.CHECK),
        (ServerState(NEW, asleep=True), 2, Action.REST),
        (ServerState(NEW, asleep=True, due=NOW), 2, Action.CHECK),
        (ServerState(NEW, problem=WRONG, due=NOW), 2, Action.SLEEP),
        (ServerState(NEW, problem=WRONG, asleep=True, due=NOW), 2, Action.REST),
        (ServerState(problem=AWAY, due=NOW), 2, Action.LOAD),
        (ServerState(OLD, asleep=True), 0, Action.LOAD),
        (ServerState(NEW, asleep=True), 0, Action.LOAD),
    ],
)
def test_next_action_of_each_state_while_servers_sleep_and_after(
    state: ServerState, sleep: int, action: Action
) -> None:
    assert state.next_action(replace(_target(NEW), sleep=sleep), NOW) is action


@pytest.mark.parametrize(
    ("before", "action", "outcome", "after"),
    [
        (ServerState(OLD, proven=True), Action.LOAD, NEW, ServerState(NEW)),
        (ServerState(), Action.LOAD, AWAY, ServerState(problem=AWAY, away_since=NOW, due=NOW + PAUSE)),
        (ServerState(problem=AWAY, away_since=5.0, due=6.0), Action.LOAD, NEW, ServerState(NEW)),
        (
            ServerState(problem=AWAY, away_since=5.0, due=6.0),
            Action.LOAD,
            AWAY,
            ServerState(problem=AWAY, away_since=5.0, due=NOW + PAUSE),
        ),
        (ServerState(NEW, proven=True, due=NOW), Action.CHECK, NEW, ServerState(NEW, proven=True)),
        (ServerState(NEW, due=NOW), Action.CHECK, NEW, ServerState(NEW)),
        (ServerState(NEW, proven=True, due=NOW), Action.CHECK, None, ServerState()),
        (ServerState(NEW), Action.PROVE, NEW, ServerState(NEW, proven=True)),
        (ServerState(NEW), Action.PROVE, AWAY, ServerState(problem=AWAY, away_since=NOW, due=NOW + PAUSE)),
        (ServerState(NEW), Action.PROVE, WRONG, ServerState(NEW, problem=WRONG, due=NOW)),
        (ServerState(OLD, problem=WRONG, due=6.0), Action.LOAD, NEW, ServerState(NEW)),
        (ServerState(NEW, proven=True), Action.SLEEP, NEW, ServerState(NEW, proven=True, asleep=True)),
        (ServerState(NEW), Action.SLEEP, AWAY, ServerState(problem=AWAY, away_since=NOW, due=NOW + PAUSE)),
        (ServerState(NEW, problem=WRONG), Action.SLEEP, NEW, ServerState(NEW, problem=WRONG, asleep=True)),
        (ServerState(NEW, asleep=True, due=NOW), Action.CHECK, NEW, ServerState(NEW, asleep=True)),
        (ServerState(NEW, asleep=True, due=NOW), Action.CHECK, None, ServerState()),
        (ServerState(NEW, proven=True, asleep=True), Action.LOAD, NEW, ServerState(NEW)),
    ],
)
def test_state_after_each_outcome(
    before: ServerState, action: Action, outcome: ActionResult, after: ServerState
) -> None:
    assert before.begun(action).after(action, NEW, outcome, NOW) == after


def test_check_that_is_requested_in_an_action_follows_it_except_after_a_load() -> None:
    for action, due in ((Action.PROVE, NOW), (Action.CHECK, NOW), (Action.LOAD, float("inf"))):
        state = ServerState(NEW).begun(action).check_at(NOW).after(action, NEW, NEW, NOW)
        assert state.due == due
    assert ServerState(problem=AWAY, due=NOW + PAUSE).check_at(NOW).due == NOW + PAUSE


def test_server_that_falls_asleep_is_not_ready() -> None:
    """The end of a training must not take it for awake."""
    state = ServerState(NEW, proven=True)
    assert state.ready(NEW, proven=True)
    assert not state.begun(Action.SLEEP).ready(NEW, proven=False)
    assert state.begun(Action.PROVE).ready(NEW, proven=False)


def test_load_in_progress_keeps_the_problem_of_a_server_that_does_not_answer_and_no_failed_proof() -> None:
    assert ServerState(problem=AWAY, away_since=5.0, due=6.0).begun(Action.LOAD).problem is AWAY
    assert ServerState(OLD, problem=WRONG, due=6.0).begun(Action.LOAD).problem is None


def test_rest_ends_when_the_next_attempt_is_due() -> None:
    assert ServerState(problem=AWAY, due=NOW + PAUSE).seconds_of_rest(NOW) == PAUSE
    assert ServerState(NEW, proven=True).seconds_of_rest(NOW) is None
    assert ServerState(NEW, problem=WRONG, due=NOW).seconds_of_rest(NOW) is None


FAULTS = ("works", "lost answer", "unreachable", "refuses", "restarts", "wrong weights")


@dataclass
class _Server:
    """A server without sockets. An action changes it when the action ends."""

    state: ServerState = field(default_factory=ServerState)
    has: PolicyVersion | None = None
    asleep: bool = False
    loads: list[PolicyVersion] = field(default_factory=list)
    busy: tuple[Action, Target] | None = None

    def begin(self, target: Target, now: float) -> bool:
        """Returns whether there is something to do."""
        if self.busy is None and (action := self.state.next_action(target, now)) is not Action.REST:
            self.state, self.busy = self.state.begun(action), (action, target)
        return self.busy is not None

    def end(self, fault: str, now: float) -> None:
        if self.busy is None:
            return
        (action, target), self.busy = self.busy, None
        self.state = self.state.after(action, target.version, self._outcome(action, target.version, fault), now)

    def _outcome(self, action: Action, version: PolicyVersion, fault: str) -> ActionResult:
        if fault == "restarts":
            self.has, self.asleep = None, False
        if fault in ("unreachable", "restarts"):
            return AWAY
        if fault == "refuses":
            return PublishError("model_server_refused", "no", permanent=True)
        if action is Action.SLEEP:
            self.asleep = True
        if action is Action.PROVE:
            assert not self.asleep, "the proof would wait for an answer until the time-out"
        if action is Action.LOAD or (action is Action.PROVE and self.has != version):  # A proof publishes again.
            self.loads.append(version)
            self.has, self.asleep = version, False
        if fault == "lost answer":
            return AWAY
        if fault == "wrong weights" and action is Action.PROVE:
            return WRONG
        return version if self.has == version else None


EVENTS = st.one_of(
    st.just(("publish", 0, "")),
    st.just(("sleep", 0, "")),
    st.just(("ensure", 0, "")),
    st.just(("pause", 0, "")),
    st.tuples(st.just("begin"), st.integers(0, 2), st.just("")),
    st.tuples(st.just("end"), st.integers(0, 2), st.sampled_from(FAULTS)),
    st.tuples(st.just("restart"), st.integers(0, 2), st.just("")),
)


@given(st.lists(EVENTS, max_size=60), st.booleans())
def test_every_server_that_answers_ends_at_the_target_version(
    events: Sequence[tuple[str, int, str]], hangs: bool
) -> None:
    """`hangs`: the first server's last action never ends. It changes nothing for the others."""
    servers, target, now = [_Server(), _Server(), _Server()], _target(PolicyVersion(1, 0)), 0.0
    for what, number, fault in events:
        now += 0.01
        if what == "publish":
            target = _target(PolicyVersion(1, target.version.step + 1))
        elif what == "sleep":
            target = replace(target, sleep=2)
        elif what == "ensure":
            for server in servers:
                server.state = server.state.check_at(now)
        elif what == "pause":
            now += PAUSE
        elif what == "begin":
            servers[number].begin(target, now)
        elif what == "end":
            servers[number].end(fault, now)
        else:
            servers[number].has, servers[number].asleep = None, False
    answering = servers[1:] if hangs and servers[0].begin(target, now) else servers
    for server in answering:
        server.end("works", now)
    target = _target(PolicyVersion(1, target.version.step + 1))  # Servers that were left out get this version.
    now += PAUSE
    for server in answering:
        server.state = server.state.check_at(now)
        for _ in range(4):
            server.begin(target, now)
            server.end("works", now)
        assert not server.begin(target, now), "the server is at rest"
        assert server.state.ready(target.version, proven=True)
        assert not server.asleep
        assert server.state.away_since is None
        assert server.has == target.version
    target = replace(target, sleep=1)
    for server in answering:
        assert server.begin(target, now)
        server.end("works", now)
        assert server.state.asleep == server.asleep
    for server in servers:
        assert server.loads == sorted(server.loads, key=lambda version: version.step), "no version after a newer one"


class _Scripted(ModelServer):
    """A server in this process. Its requests fail by a script, and then work."""

    def __init__(self, number: int, script: Sequence[str], hangs_in: int | None) -> None:
        super().__init__(f"http://server-{number}.invalid:9001", "token", patience=60.0)
        self.script, self.has, self.loads = iter(script), "default", list[str]()
        self.hangs_in, self.go = hangs_in, threading.Event()

    def publish(self, path: Path, version: PolicyVersion) -> None:
        self._ask()
        if len(self.loads) == self.hangs_in:
            assert self.go.wait(60)
        self.loads.append(str(version))
        self.has = str(version)

    def served_version(self) -> str:
        self._ask()
        return self.has

    def _ask(self) -> None:
        fault = next(self.script, "works")
        if fault == "restarts":
            self.has = "default"
        if fault != "works":
            code = "model_server_refused" if fault == "refuses" else "model_server_unreachable"
            raise PublishError(code, "no", url=self.url)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from(("works", "unreachable", "refuses", "restarts")), max_size=6), min_size=2, max_size=3
    ),
    st.one_of(st.none(), st.integers(0, 3)),
)
def test_publications_reach_every_server_and_wait_for_none_that_hangs(
    scripts: Sequence[Sequence[str]], hangs_in: int | None
) -> None:
    """`hangs_in`: the first server hangs in this load until all versions are published."""
    servers = [_Scripted(number, script, None if number else hangs_in) for number, script in enumerate(scripts)]
    with (
        mock.patch("gristmill_trainer.publish.reconcile.PAUSE", 0.001),
        mock.patch("gristmill_trainer.publish.pool._OTHERS_LEAST", 0.0),
        mock.patch("gristmill_trainer.publish.pool._OTHERS_TIMES", 0.0),
    ):
        pool = ModelServers(servers)
        for step in range(4):
            pool.load(Path(f"/weights/1.{step}"), PolicyVersion(1, step))
            assert any(server.has == f"1.{step}" for server in servers)
            pool.ensure()
        _until_all_have("1.3", servers if hangs_in is None else servers[1:])
        servers[0].go.set()
        _until_all_have("1.3", servers)
        pool.close()
    for server in servers:
        assert server.loads == sorted(server.loads)
        assert server.loads[-1] == "1.3"


def _until_all_have(version: str, servers: Sequence[_Scripted]) -> None:
    deadline = time.monotonic() + 60
    while any(server.has != version for server in servers):
        assert time.monotonic() < deadline, [(server.url, server.has) for server in servers]
        time.sleep(0.001)
