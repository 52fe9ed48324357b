"""Environments that block, hang or fail: their rollout ends, all are closed, and the process can be stopped."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.errors import raises
from tests.unit.env.conftest import FailingServer
from tests.unit.env.inference.conftest import CHAT, answers, said

from gristmill_env.data import Item, Message, user
from gristmill_env.environments import Environment, EnvironmentFactory, EnvironmentRunner, Reply, StepResult
from gristmill_env.environments import runner as environment_runner
from gristmill_env.errors import DatasetError, EnvError, EpisodeError, RewardError
from gristmill_env.inference import ModelServers
from gristmill_env.rewards import Scorer, WeightedReward, create_reward
from gristmill_env.rollouts.generator import RolloutGenerator
from gristmill_env.rollouts.groups import RolloutGroup
from gristmill_env.rollouts.prompts import PromptBuilder
from gristmill_env.running import runner
from gristmill_env.settings import EnvConfig, ServerConfig

pytestmark = pytest.mark.slow

ITEM = Item(row=0, index=0, prompt="?", answer="2")
REPLY = Reply("2", "stop", 1)


class Recorded(Environment):
    """Records the calls on each of its objects."""

    made: list[Recorded]
    let_go: threading.Event

    def __init__(self) -> None:
        self.number = len(self.made)
        self.closed = 0
        self.steps = 0
        self.made.append(self)

    def reset(self, item: Item) -> Sequence[Message]:
        return [user(f"{item.prompt} {self.number}")]

    def step(self, reply: Reply) -> StepResult:
        return StepResult.end(1.0)

    def close(self) -> None:
        self.closed += 1


class Talks(Recorded):
    """Four turns."""

    def step(self, reply: Reply) -> StepResult:
        self.steps += 1
        return StepResult.end(1.0) if self.steps == 4 else StepResult((user("again"),))


class FailsToReset(Recorded):
    def reset(self, item: Item) -> Sequence[Message]:
        if self.number == 1:
            raise KeyError("no board")
        return super().reset(item)


class HangsToOpen(Recorded):
    def __init__(self) -> None:
        super().__init__()
        if self.number == 1:
            self.let_go.wait()


class HangsToOpenOrFailsToReset(HangsToOpen):
    def reset(self, item: Item) -> Sequence[Message]:
        if self.number == 2:
            raise KeyError("no board")
        return super().reset(item)


class FailsToStep(Recorded):
    def step(self, reply: Reply) -> StepResult:
        if self.number == 1:
            raise KeyError("no board")
        return super().step(reply)


class FailsToClose(Recorded):
    def close(self) -> None:
        super().close()
        raise KeyError("the sandbox is gone")


class Hangs(Recorded):
    """Blocks in its second step. It ends only when the test releases it."""

    def step(self, reply: Reply) -> StepResult:
        if self.number == 1:
            self.let_go.wait()
        return super().step(reply)


class HangsAsync(Recorded):
    async def step(self, reply: Reply) -> StepResult:  # type: ignore[override]
        if self.number == 1:
            await asyncio.get_running_loop().create_future()
        return StepResult.end(1.0)


class BlocksItsLoop(Recorded):
    async def step(self, reply: Reply) -> StepResult:  # type: ignore[override]
        self.steps += 1
        if self.number == 1:
            self.let_go.wait()  # in place of an await
        else:
            await asyncio.sleep(60)
        return StepResult.end(1.0)


class ClosesAsync(Recorded):
    async def close(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        self.closed += 1


Roll = Callable[[], Any]
Make = Callable[..., Roll]


@pytest.fixture
async def rolls(failing_server: FailingServer) -> AsyncIterator[Make]:
    """Returns a generator that rolls a group of three in an environment, against a server that gives text."""
    failing_server.takes_tokens = False
    failing_server.answers[CHAT] = lambda: answers(said("2"))
    Recorded.made, Recorded.let_go = [], threading.Event()
    rewards = [WeightedReward(create_reward("accuracy"), 1.0)]
    runners: list[EnvironmentRunner] = []
    async with (
        Scorer(rewards, has_answer=True) as scorer,
        ModelServers([ServerConfig(base_url=failing_server.url)], patience=5) as servers,
    ):
        await servers.connect(patience=5)

        def make(kind: type[Environment], *, step_timeout: float = 60.0) -> Roll:
            runners.append(EnvironmentRunner(EnvironmentFactory(kind), step_timeout))
            config = EnvConfig(group_size=3, min_rollouts=3, rollout_retries=0)
            generator = RolloutGenerator(config, PromptBuilder(None), servers, scorer, runners[-1], max_length=1024)
            return lambda: generator.generate_and_score(ITEM, "test")

        yield make
        Recorded.let_go.set()
        for one in runners:
            one.stop()


async def test_turns_of_a_rollout_stay_on_the_server_of_its_first_turn(
    two_servers: tuple[FailingServer, FailingServer],
) -> None:
    for server in two_servers:
        server.takes_tokens, server.delay = False, 0.05
        server.answers[CHAT] = lambda: answers(said("2"))
    Recorded.made = []
    rewards = [WeightedReward(create_reward("accuracy"), 1.0)]
    talks = EnvironmentRunner(EnvironmentFactory(Talks), 60.0)
    configs = [ServerConfig(base_url=server.url) for server in two_servers]
    async with Scorer(rewards, has_answer=True) as scorer, ModelServers(configs, patience=5) as servers:
        await servers.connect(patience=5)
        config = EnvConfig(group_size=2)
        generator = RolloutGenerator(config, PromptBuilder(None), servers, scorer, talks, max_length=1024)
        for _ in range(5):
            await generator.generate_and_score(ITEM, "test")
    talks.stop()
    begun = [[body["messages"][0]["content"] for body in server.bodies] for server in two_servers]
    assert not set(begun[0]) & set(begun[1])
    assert [len(prompts) for prompts in begun] == [5 * 4, 5 * 4]


def closed() -> list[int]:
    """Returns how often each environment was closed."""
    return [environment.closed for environment in Recorded.made]


@pytest.mark.parametrize("kind", [Recorded, ClosesAsync])
async def test_environments_are_closed_when_their_attempts_end(rolls: Make, kind: type[Environment]) -> None:
    group: RolloutGroup = await rolls(kind)()
    assert [rollout.reward for rollout in group.rollouts] == [1.0] * 3
    assert closed() == [1] * 3


@pytest.mark.parametrize("kind", [FailsToReset, FailsToStep])
async def test_all_environments_of_a_group_are_closed_when_one_fails(rolls: Make, kind: type[Environment]) -> None:
    with raises(EpisodeError, "environment_raised", error="KeyError"):
        await rolls(kind)()
    await all_are_closed()
    assert len(Recorded.made) >= 2


async def test_environment_that_fails_to_close_fails_no_attempt(rolls: Make, caplog: pytest.LogCaptureFixture) -> None:
    group: RolloutGroup = await rolls(FailsToClose)()
    assert [rollout.reward for rollout in group.rollouts] == [1.0] * 3
    assert "the sandbox is gone" in caplog.text


@pytest.mark.parametrize("kind", [Hangs, HangsAsync, BlocksItsLoop])
async def test_step_that_hangs_ends_with_its_time_limit_and_all_are_closed(
    rolls: Make, kind: type[Environment]
) -> None:
    with pytest.raises(EpisodeError):
        await rolls(kind, step_timeout=1.0)()
    assert closed() == [1] * 3


@pytest.mark.parametrize("kind", [Hangs, HangsAsync])
async def test_environments_are_closed_when_their_group_is_cancelled(rolls: Make, kind: type[Environment]) -> None:
    task = asyncio.create_task(rolls(kind)())
    while len(Recorded.made) < 3 or sum(closed()) < 2:  # noqa: ASYNC110  the two that do not hang
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert closed() == [1] * 3


async def all_are_closed() -> None:
    async with asyncio.timeout(60):
        while closed() != [1] * len(Recorded.made):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("kind", "step_timeout"), [(HangsToOpen, 1.0), (HangsToOpenOrFailsToReset, 60.0)], ids=["overruns", "cancelled"]
)
async def test_environment_whose_init_returns_after_its_group_failed_is_closed(
    rolls: Make, kind: type[Environment], step_timeout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_runner, "_GOODBYE", 0.1)
    with pytest.raises(EpisodeError):
        await rolls(kind, step_timeout=step_timeout)()
    assert Recorded.made[1].closed == 0
    Recorded.let_go.set()
    await all_are_closed()


async def test_environment_is_closed_if_the_interruption_of_its_init_arrives_late(
    rolls: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interruption of a call that overran may arrive when the call has already returned."""
    loop = asyncio.get_running_loop()
    call_soon = loop.call_soon_threadsafe
    reports: list[object] = []

    def interrupted(callback: Callable[..., object], *arguments: Any, **options: Any) -> object:
        if getattr(callback, "__name__", "") == "_set_made":
            reports.append(callback)
            if len(reports) == 1:
                raise SystemExit
        return call_soon(callback, *arguments, **options)

    monkeypatch.setattr(loop, "call_soon_threadsafe", interrupted)
    late: list[asyncio.Task[None]] = []
    async with EnvironmentRunner(EnvironmentFactory(HangsToOpen), 0.3) as environments:
        await environments.open(late.append)
        with pytest.raises(EpisodeError):
            await environments.open(late.append)
        Recorded.let_go.set()
        await asyncio.gather(*late)
    assert closed() == [0, 1]


async def test_group_that_is_cancelled_closes_an_environment_whose_init_is_running(rolls: Make) -> None:
    task = asyncio.create_task(rolls(HangsToOpen)())
    while len(Recorded.made) < 3:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    task.cancel()
    asyncio.get_running_loop().call_later(0.1, Recorded.let_go.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert closed() == [1] * 3


async def test_a_step_is_not_done_twice_when_another_blocks_the_loop(rolls: Make) -> None:
    async with EnvironmentRunner(EnvironmentFactory(BlocksItsLoop), 1.0) as environments:
        opened = [await environments.open(lambda _: None) for _ in range(3)]
        steps = [environments.step(environment, REPLY) for environment in opened]
        ended = await asyncio.gather(*steps, return_exceptions=True)
    assert [type(end) for end in ended] == [EpisodeError] * 3
    assert [environment.steps for environment in Recorded.made] == [1, 1, 1]


async def test_too_many_steps_that_hang_end_the_run(rolls: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MOST_HANGING", 1)
    roll = rolls(Hangs, step_timeout=0.3)
    with pytest.raises(EpisodeError):
        await roll()
    Recorded.made.clear()
    with pytest.raises(EnvError) as error:
        await roll()
    assert not isinstance(error.value, EpisodeError)


async def test_environments_do_not_wait_for_the_executor_of_the_loop(rolls: Make) -> None:
    loop, let_go = asyncio.get_running_loop(), threading.Event()
    loop.set_default_executor(ThreadPoolExecutor(1))
    stuck = loop.run_in_executor(None, let_go.wait)
    try:
        async with asyncio.timeout(60):
            assert len((await rolls(Recorded)()).rollouts) == 3
    finally:
        let_go.set()
        await stuck


async def test_runner_closes_an_environment_that_is_only_opened(rolls: Make) -> None:
    Recorded.made.clear()
    async with EnvironmentRunner(EnvironmentFactory(Recorded), 60) as environments:
        assert await environments.opening(ITEM) == [user("? 0")]
    assert closed() == [1]


async def test_own_errors_are_raised_unchanged(rolls: Make) -> None:
    class Refuses(Recorded):
        def reset(self, item: Item) -> Sequence[Message]:
            raise DatasetError("row_unplayable", "not this row", row=item.row)

    with raises(DatasetError, "row_unplayable"):
        await rolls(Refuses)()


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


class Returns(Recorded):
    """Returns a test's values."""

    opening: Any
    result: Any

    def reset(self, item: Item) -> Any:
        return self.opening

    def step(self, reply: Reply) -> Any:
        return self.result


class ReturnsAsync(Returns):
    async def reset(self, item: Item) -> Any:  # type: ignore[override]
        return self.opening

    async def step(self, reply: Reply) -> Any:  # type: ignore[override]
        return self.result


@pytest.mark.parametrize("kind", [Returns, ReturnsAsync])
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
    await all_are_closed()


@pytest.mark.parametrize("turns", [None, 0, "4", 1.5, True])
async def test_wrong_number_of_turns_is_an_error_of_the_environment(rolls: Make, turns: Any) -> None:
    kind = type("Turns", (Recorded,), {"max_turns": turns})
    with raises(EpisodeError, "environment_value", method="Turns.max_turns", row=0):
        await rolls(kind)()


@pytest.mark.parametrize("reward", [1, True, np.float32(1.0), np.array(1.0), Fraction(1)])
async def test_numbers_of_other_types_are_rewards(rolls: Make, monkeypatch: pytest.MonkeyPatch, reward: Any) -> None:
    monkeypatch.setattr(Returns, "opening", [user("?")], raising=False)
    monkeypatch.setattr(Returns, "result", StepResult(done=np.True_, reward=reward), raising=False)  # type: ignore[arg-type]
    group: RolloutGroup = await rolls(Returns)()
    assert [(type(rollout.reward), rollout.reward) for rollout in group.rollouts] == [(float, 1.0)] * 3


class FailsForAWhile(Recorded):
    def step(self, reply: Reply) -> StepResult:
        if self.number < 4:
            raise ConnectionRefusedError("no sandbox")
        return super().step(reply)


async def test_rollout_without_retries_is_played_again_after_an_error_that_may_pass(rolls: Make) -> None:
    group: RolloutGroup = await rolls(FailsForAWhile)()
    assert [rollout.reward for rollout in group.rollouts] == [1.0] * 3
    assert len(Recorded.made) == 7, "each failed rollout is played again, and no other rollout"
    assert closed() == [1] * 7


async def test_errors_of_other_packages_parts_are_errors_of_the_environment(rolls: Make) -> None:
    class Refuses(Recorded):
        def step(self, reply: Reply) -> StepResult:
            raise RewardError("unknown_reward", "not of this row")

    with raises(EpisodeError, "environment_raised", error="RewardError"):
        await rolls(Refuses)()


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
from gristmill_env.cli import _until_signal

async def work():
    print("ready", flush=True)
    await asyncio.to_thread(time.sleep, 1000)  # a disk that hangs

sys.exit(asyncio.run(_until_signal(work())))
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
