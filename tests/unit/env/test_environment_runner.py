"""Environments that block, hang or fail: their rollout ends, all are closed, and the process can be stopped."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.errors import raises
from tests.support.grids import rest_is_long
from tests.unit.env.conftest import FailingServer
from tests.unit.env.inference.conftest import CHAT, answers, said

from gristmill.internal.logs import LineFormatter
from gristmill_env.data import Item, user
from gristmill_env.environments import (
    Environment,
    EnvironmentFactory,
    EnvironmentRunner,
    Model,
    Reply,
    StepResult,
    child,
    create_environment,
)
from gristmill_env.environments import runner as environment_runner
from gristmill_env.environments.model import End, LeaveOut, Say
from gristmill_env.errors import DatasetError, EpisodeError
from gristmill_env.gateway import Policy
from gristmill_env.inference import ModelServers
from gristmill_env.rewards import Scorer, WeightedReward, create_reward
from gristmill_env.rollouts.generator import RolloutGenerator
from gristmill_env.rollouts.groups import RolloutGroup
from gristmill_env.rollouts.prompts import PromptBuilder
from gristmill_env.running import code_process
from gristmill_env.settings.run import EnvConfig
from gristmill_env.settings.servers import ServerConfig

pytestmark = pytest.mark.slow

ITEM = Item(row=0, index=0, prompt="?", answer="2")
BRIEF = 2.0
"""Seconds that an environment has to close, and a process to end, where a test waits for that."""

Roll = Callable[[], Any]
Make = Callable[..., Roll]


class Log:
    """The lines that the environments of `games` have written."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "log"
        self.let_go = folder / "let_go"

    def numbers(self, what: str) -> list[int]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [int(line.split()[1]) for line in lines if line.split()[0] == what]

    @property
    def all_closed_once(self) -> bool:
        """Whether each environment that was made was closed once."""
        return Counter(self.numbers("closed")) == Counter(self.numbers("made"))

    async def until(self, happened: Callable[[Log], bool]) -> None:
        async with asyncio.timeout(60):
            while not happened(self):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log(tmp_path)
    monkeypatch.setenv("GAMES_LOG", str(log.path))
    return log


@pytest.fixture
async def rolls(failing_server: FailingServer, log: Log) -> AsyncIterator[Make]:
    """Returns a generator that rolls a group of three in an environment, against a server that gives text.

    The environment is the name of a class of `games`, which runs in a process, or a class, which runs in place.
    """
    failing_server.takes_tokens = False
    failing_server.answers[CHAT] = lambda: answers(said("2"))
    rewards = [WeightedReward(create_reward("accuracy"), 1.0)]
    runners: list[EnvironmentRunner] = []
    async with (
        Scorer(rewards, has_answer=True) as scorer,
        ModelServers([ServerConfig(base_url=failing_server.url)], patience=5) as servers,
    ):
        await servers.connect(patience=5)

        def make(kind: str | type[Environment], *, step_timeout: float = 60.0, **settings: Any) -> Roll:
            runners.append(EnvironmentRunner(factory(kind), step_timeout))
            config = EnvConfig.model_validate({"group_size": 3, "min_rollouts": 3, "rollout_retries": 0, **settings})
            generator = RolloutGenerator(
                config, Policy("tiny", PromptBuilder(None), servers, 1024), scorer, runners[-1]
            )
            return lambda: generator.generate_and_score(ITEM, "test")

        yield make
        for one in runners:
            await one.close()


def factory(kind: str | type[Environment], **params: Any) -> EnvironmentFactory:
    return create_environment(f"{GAMES}:{kind}", params) if isinstance(kind, str) else EnvironmentFactory(kind)


GAMES = "tests.unit.env.games"


async def reply(asked: Say | LeaveOut) -> Reply:
    """Answers an environment at once."""
    return Reply("2", "stop", 1, answer="2", turn=0)


async def test_turns_of_a_rollout_stay_on_the_server_of_its_first_turn(
    two_servers: tuple[FailingServer, FailingServer],
) -> None:
    made: list[Environment] = []
    both = asyncio.Barrier(2)

    class Talks(Environment):
        async def play(self, item: Item, model: Model) -> float:
            made.append(self)
            number = len(made)
            await both.wait()  # Otherwise the first request may be over before the second one is sent.
            await model.say(f"{item.prompt} {number}")
            for _ in range(3):
                await model.say("again")
            return 1.0

    for server in two_servers:
        server.takes_tokens, server.delay = False, 0.05
        server.answers[CHAT] = lambda: answers(said("2"))
    rewards = [WeightedReward(create_reward("accuracy"), 1.0)]
    talks = EnvironmentRunner(EnvironmentFactory(Talks), 60.0)
    configs = [ServerConfig(base_url=server.url) for server in two_servers]
    async with Scorer(rewards, has_answer=True) as scorer, ModelServers(configs, patience=5) as servers:
        await servers.connect(patience=5)
        config = EnvConfig(group_size=2)
        generator = RolloutGenerator(config, Policy("tiny", PromptBuilder(None), servers, 1024), scorer, talks)
        for _ in range(5):
            await generator.generate_and_score(ITEM, "test")
    begun = [[body["messages"][0]["content"] for body in server.bodies] for server in two_servers]
    assert not set(begun[0]) & set(begun[1])
    assert [len(prompts) for prompts in begun] == [5 * 4, 5 * 4]


# --- Ends and closes -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", rest_is_long("Recorded", "ClosesAsync"))
async def test_environments_are_closed_when_their_attempts_end(rolls: Make, log: Log, kind: str) -> None:
    group: RolloutGroup = await rolls(kind)()
    assert [rollout.reward for rollout in group.rollouts] == [1.0] * 3
    assert (sorted(log.numbers("made")), log.all_closed_once) == ([0, 1, 2], True)


@pytest.mark.parametrize(
    ("kind", "error"), rest_is_long(("FailsToStep", "KeyError"), ("FailsToReset", "KeyError"), ("Exits", "SystemExit"))
)
async def test_all_environments_of_a_group_are_closed_when_one_fails(
    rolls: Make, log: Log, kind: str, error: str
) -> None:
    with raises(EpisodeError, "environment_raised", error=error):
        await rolls(kind)()
    await log.until(lambda log: log.all_closed_once)
    assert len(log.numbers("made")) >= 2


async def test_first_exception_of_a_method_is_logged_with_its_traceback(
    rolls: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with raises(EpisodeError, "environment_raised", method="FailsToStep.step"):
        await rolls("FailsToStep")()
    (record,) = caplog.records
    assert 'raise KeyError("no board")' in LineFormatter().format(record)


async def test_environment_that_fails_to_close_fails_no_attempt(rolls: Make, caplog: pytest.LogCaptureFixture) -> None:
    group: RolloutGroup = await rolls("FailsToClose")()
    assert [rollout.reward for rollout in group.rollouts] == [1.0] * 3
    assert "the sandbox is gone" in caplog.text


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_runner, "_GOODBYE", BRIEF)
    monkeypatch.setattr(code_process, "GRACE", BRIEF)
    monkeypatch.setattr(environment_runner, "GRACE", BRIEF)


@pytest.mark.long
@pytest.mark.usefixtures("brief")
async def test_close_that_hangs_fails_no_attempt(rolls: Make, log: Log) -> None:
    group: RolloutGroup = await rolls("HangsToClose", step_timeout=1.0)()
    assert [rollout.reward for rollout in group.rollouts] == [1.0] * 3
    assert log.all_closed_once


@pytest.mark.parametrize(
    ("kind", "code", "method"),
    rest_is_long(
        ("Hangs", "call_overran", "Hangs.step"),
        ("BlocksItsLoop", "loop_blocked", "BlocksItsLoop"),
        ("HangsAsync", "call_overran", "HangsAsync.step"),
        first=2,
    ),
)
@pytest.mark.usefixtures("brief")
async def test_step_that_hangs_ends_with_its_time_limit_and_all_are_closed(
    rolls: Make, log: Log, kind: str, code: str, method: str
) -> None:
    with raises(EpisodeError, code, method=method, seconds=1.0):
        await rolls(kind, step_timeout=1.0)()
    if kind != "BlocksItsLoop":  # whose process cannot do anything any more
        assert log.all_closed_once


@pytest.mark.parametrize("kind", rest_is_long("Hangs", "HangsAsync"))
@pytest.mark.usefixtures("brief")
async def test_environments_are_closed_when_their_group_is_cancelled(rolls: Make, log: Log, kind: str) -> None:
    task = asyncio.create_task(rolls(kind)())
    await log.until(lambda log: len(log.numbers("closed")) == 2 and log.numbers("hangs") == [1])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert log.all_closed_once


class Watched:
    """Reads what environments ask, and keeps the failures among it."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self._decoder = child.asked

    def decode(self, body: bytes) -> Any:
        asked = self._decoder.decode(body)
        if isinstance(asked, End) and asked.failure is not None:
            self.failures.append(str(asked.failure.code))
        return asked


@pytest.mark.parametrize(
    ("kind", "step_timeout", "code"),
    [("HangsToOpen", 1.0, "call_overran"), ("HangsToOpenOrFailsToReset", 60.0, "environment_raised")],
    ids=["overruns", "cancelled"],
)
async def test_environment_whose_init_returns_after_its_group_failed_is_closed(
    rolls: Make, log: Log, kind: str, step_timeout: float, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched()
    monkeypatch.setattr(child, "asked", watched)
    task = asyncio.create_task(rolls(kind, step_timeout=step_timeout)())
    await log.until(lambda _: watched.failures == [code])
    assert 1 not in log.numbers("closed")
    log.let_go.touch()
    with raises(EpisodeError, code):
        await task
    assert log.all_closed_once


async def test_group_that_is_cancelled_closes_an_environment_whose_init_is_running(rolls: Make, log: Log) -> None:
    task = asyncio.create_task(rolls("HangsToOpen")())
    await log.until(lambda log: len(log.numbers("made")) == 3)
    task.cancel()
    asyncio.get_running_loop().call_later(0.1, log.let_go.touch)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert log.all_closed_once


# --- Processes -------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("brief")
async def test_hanging_step_costs_its_process_and_not_the_run(rolls: Make, log: Log) -> None:
    group: RolloutGroup = await rolls("HangsInFirstProcess", step_timeout=5.0, rollout_retries=1)()
    assert len({rollout.reward for rollout in group.rollouts}) == 1, "all of them end in the second process"
    assert (Counter(log.numbers("made")), log.all_closed_once) == (Counter({0: 2, 1: 2, 2: 2}), True)


async def test_process_that_dies_fails_its_rollouts_and_not_the_run(rolls: Make, log: Log) -> None:
    with raises(EpisodeError, "process_died"):
        await rolls("DiesInFirstProcess")()
    group: RolloutGroup = await rolls("DiesInFirstProcess")()
    assert [rollout.reward for rollout in group.rollouts] == [1.0] * 3


async def test_plain_steps_of_256_rollouts_run_at_the_same_time() -> None:
    async with EnvironmentRunner(factory("Meets"), 120) as environments:
        ends = await asyncio.gather(*(environments.play(ITEM, reply) for _ in range(256)))
    assert [end.reward for end in ends] == [1.0] * 256


async def test_row_reaches_the_process_as_it_is() -> None:
    when = datetime.date(2026, 11, 26)
    item = replace(ITEM, columns={"when": when})
    async with EnvironmentRunner(factory("Reads", column="when"), 60) as environments:
        assert (await environments.opening(item)).messages == [user(f"date {when}")]
        end = await environments.play(item, reply)
        assert end.reward != os.getpid()
        with raises(EpisodeError, "row_not_picklable", row=0):
            await environments.play(replace(ITEM, columns={"when": lambda: 0}), reply)


async def test_environments_do_not_wait_for_the_executor_of_the_loop(rolls: Make) -> None:
    loop, let_go = asyncio.get_running_loop(), threading.Event()
    loop.set_default_executor(ThreadPoolExecutor(1))
    stuck = loop.run_in_executor(None, let_go.wait)
    try:
        async with asyncio.timeout(60):
            assert len((await rolls("Recorded")()).rollouts) == 3
    finally:
        let_go.set()
        await stuck


async def test_runner_closes_an_environment_that_is_only_opened(log: Log) -> None:
    async with EnvironmentRunner(factory("Recorded"), 60) as environments:
        assert (await environments.opening(ITEM)).messages == [user("? 0")]
        assert (log.numbers("made"), log.numbers("closed"), log.numbers("step")) == ([0], [0], [])


async def test_own_errors_are_raised_unchanged(rolls: Make) -> None:
    with raises(DatasetError, "row_unplayable", row=0):
        await rolls("RefusesRow")()


async def test_errors_of_other_packages_parts_are_errors_of_the_environment(rolls: Make) -> None:
    with raises(EpisodeError, "environment_raised", error="RewardError"):
        await rolls("RefusesReply")()


async def test_rollout_without_retries_is_played_again_after_an_error_that_may_pass(rolls: Make, log: Log) -> None:
    group: RolloutGroup = await rolls("FailsForAWhile")()
    assert [rollout.reward for rollout in group.rollouts] == [1.0] * 3
    assert len(log.numbers("made")) == 7, "each failed rollout is played again, and no other rollout"
    assert log.all_closed_once


# --- Values ----------------------------------------------------------------------------------------------------
MESSAGES_WRONG: dict[str, Any] = {
    "nothing": None, "text": "again", "texts": ["again"], "mapping": {"role": "user", "content": "x"}, "number": 3,
    "without content": [{"role": "user"}], "no text": [{"role": "user", "content": None}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "role": [{"role": 1, "content": "x"}],
    "bytes": [{"role": "user", "content": "x", "image": b"1"}], "generator": (user("x") for _ in range(1)),
}  # fmt: skip
WRONG_RESETS = MESSAGES_WRONG | {"empty": [], "result": StepResult((user("x"),))}
WRONG_STEPS: dict[str, Any] = {f"messages: {name}": StepResult(value) for name, value in MESSAGES_WRONG.items()} | {
    "nothing": None, "mapping": {"reward": 1.0}, "tuple": ((), True), "number": 1.0, "class": StepResult,
    "reward: text": StepResult.end("1"), "reward: nan": StepResult.end(float("nan")),  # type: ignore[arg-type]
    "reward: list": StepResult.end([1]), "reward: object": StepResult.end(object()),  # type: ignore[arg-type]
    "reward: infinite": StepResult.end(-float("inf")), "reward: too large": StepResult.end(10**400),
    "reward: complex": StepResult.end(1j), "reward: array": StepResult.end(np.zeros(2)),  # type: ignore[arg-type]
    "done": StepResult(done="no"), "trained": StepResult.end(1.0, trained=None),  # type: ignore[arg-type]
}  # fmt: skip


class Returns(Environment):
    """Returns a test's values."""

    opening: Any
    result: Any

    def reset(self, item: Item) -> Any:
        return self.opening

    def step(self, reply: Reply) -> Any:
        return self.result


class ReturnsAsync(Returns):
    async def reset(self, item: Item) -> Any:
        return self.opening

    async def step(self, reply: Reply) -> Any:
        return self.result


@pytest.mark.parametrize("kind", rest_is_long(Returns, ReturnsAsync))
async def test_wrong_return_value_names_method_value_and_row(
    rolls: Make, monkeypatch: pytest.MonkeyPatch, kind: type[Returns]
) -> None:
    for method, values in (("reset", WRONG_RESETS), ("step", WRONG_STEPS)):
        for name, value in values.items():
            monkeypatch.setattr(Returns, "opening", value if method == "reset" else [user("?")], raising=False)
            monkeypatch.setattr(Returns, "result", value, raising=False)
            with raises(EpisodeError, "environment_value", method=f"{kind.__name__}.{method}", row=0) as raised:
                await rolls(kind)()
            assert raised.value.values["value"], name


@pytest.mark.parametrize("turns", [None, 0, "4", 1.5, True])
async def test_wrong_number_of_turns_is_an_error_of_the_environment(rolls: Make, turns: Any) -> None:
    kind = type("Turns", (Returns,), {"max_turns": turns})
    with raises(EpisodeError, "environment_value", method="Turns.max_turns", row=0):
        await rolls(kind)()


@pytest.mark.parametrize("reward", [1, True, np.float32(1.0), np.array(1.0), Fraction(1)])
async def test_numbers_of_other_types_are_rewards(rolls: Make, monkeypatch: pytest.MonkeyPatch, reward: Any) -> None:
    monkeypatch.setattr(Returns, "opening", [user("?")], raising=False)
    monkeypatch.setattr(Returns, "result", StepResult(done=np.True_, reward=reward), raising=False)  # type: ignore[arg-type]
    group: RolloutGroup = await rolls(Returns)()
    assert [(type(rollout.reward), rollout.reward) for rollout in group.rollouts] == [(float, 1.0)] * 3


GAME = """
import time
from pathlib import Path
from gristmill_env.environments import Environment, StepResult

HERE = Path(__file__).parent

class Game(Environment):
    def reset(self, item):
        return [{"role": "user", "content": item.prompt}]
    def step(self, reply):
        (HERE / "stepping").touch()
        while True:
            time.sleep(1000)
    def close(self):
        (HERE / "closed").touch()
"""


@pytest.mark.long
def test_sigterm_ends_the_process_while_a_step_hangs(tmp_path: Path, failing_server: FailingServer) -> None:
    failing_server.takes_tokens = False
    failing_server.answers[CHAT] = lambda: answers(said("2"))
    (tmp_path / "game.py").write_text(GAME)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    run = {
        "group_size": 2, "environment": "game.py:Game", "server_configs": [{"base_url": failing_server.url}],
        "dataset": {"dataset_path": "rows.jsonl", "reward_functions": ["episode"]},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(json.dumps(run))
    command = [sys.executable, "-m", "gristmill_env", "process", "--config", "run.yaml", "--groups", "1"]
    environ = {**os.environ, "GRISTMILL_MODELS_DIR": "/nowhere", "GRISTMILL_RUNS_DIR": str(tmp_path / "runs")}
    process = subprocess.Popen(command, cwd=tmp_path, env=environ)
    try:
        until = time.monotonic() + 120
        while not (tmp_path / "stepping").exists():
            assert time.monotonic() < until
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    assert (tmp_path / "closed").exists()


STUCK = """
import asyncio, sys, time
from gristmill_env.cli import until_signal

async def work():
    print("ready", flush=True)
    await asyncio.to_thread(time.sleep, 1000)  # a disk that hangs

sys.exit(asyncio.run(until_signal(work())))
"""


def test_sigterm_ends_the_process_while_a_thread_of_the_loop_hangs() -> None:
    process = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
