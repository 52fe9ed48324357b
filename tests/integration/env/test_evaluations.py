"""When a run in training is evaluated and by whom, against the real API."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.integration.env.conftest import TRAINER
from tests.support.api_server import ApiServer

from gristmill import Client, PolicyVersion, SamplingParams
from gristmill_env.data import Item
from gristmill_env.evaluation.during import RunEvaluations
from gristmill_env.evaluation.evaluate import Roll
from gristmill_env.evaluation.plan import Plan
from gristmill_env.evaluation.results import Evaluated
from gristmill_env.evaluation.summary import RewardFigures, summarise
from gristmill_env.holder import holder_name
from gristmill_env.rollout import Rollout
from gristmill_env.settings import EnvConfig, EvalHandling
from gristmill_env.tracking import NoTracker

PLAN = Plan(
    task="sums", model="tiny", weights="1.0", dataset="sums", rows=0, prompts=0, samples=1,
    sampling=SamplingParams(temperature=0, max_tokens=8), max_length=64, decides="length", compares=False, settings={},
)  # fmt: skip
NOTHING = RewardFigures(mean=None, low=None, high=None, scored=0, skipped=0, errors=0)


def never(item: Item, name: str, *, sampling: SamplingParams, count: int) -> Awaitable[Rollout]:
    raise AssertionError("this evaluation has no prompts")


class Environment:
    """One environment of the run: its evaluations, and which versions it measured."""

    def __init__(self, api: Client, holder: str, handling: EvalHandling = EvalHandling.STOP_TRAIN) -> None:
        self.measured: list[str] = []
        self.rewards: dict[str, RewardFigures] = {}
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()
        self.may_end.set()
        config = EnvConfig(steps_per_eval=10, eval_handling=handling, eval_limit_ratio=0.25)
        self.evaluations = RunEvaluations(config, "sums", holder, api, self._measure, NoTracker())

    async def sees(self, *versions: str) -> None:
        for version in versions:
            async with asyncio.TaskGroup() as tasks:
                self.evaluations.see(version, never, tasks)

    async def _measure(self, version: str, roll: Roll) -> Evaluated:
        self.measured.append(version)
        self.begun.set()
        await self.may_end.wait()
        summary = replace(summarise(PLAN, []), rewards=self.rewards)
        return Evaluated(PLAN, summary, Path("nowhere"), started=0, ended=1, resumed=0)


@pytest.fixture
async def api(redis_url: str, session_api: ApiServer) -> AsyncIterator[Client]:
    """A client of an API that knows the run, and its trainer."""
    async with Client(session_api.url) as client:
        await client.create_run("sums", {}, 2)
        await client.take("sums", TRAINER, [])
        await client.record_version("sums", PolicyVersion(1, 0))
        yield client


async def steps(api: Client) -> list[int]:
    return [row.step for row in await api.metrics("sums", "eval")]


async def test_before_the_first_step_every_so_many_and_at_the_end(api: Client) -> None:
    env = Environment(api, "a")
    await env.sees("1.0", "1.1", "1.9", "1.10", "1.12", "1.31", "1.35")
    await env.evaluations.at_end("1.38", never)
    assert env.measured == ["1.0", "1.10", "1.31", "1.38"]
    assert await steps(api) == [0, 10, 31, 38]


async def test_the_last_version_is_not_evaluated_twice(api: Client) -> None:
    env = Environment(api, "a")
    await env.sees("1.0", "1.10")
    await env.evaluations.at_end("1.10", never)
    assert env.measured == ["1.0", "1.10"]


async def test_of_several_environments_one_evaluates(api: Client) -> None:
    envs = [Environment(api, f"env-{number}") for number in range(4)]
    for version in ("1.0", "1.10", "1.20"):
        await asyncio.gather(*(env.sees(version) for env in envs))
    await asyncio.gather(*(env.evaluations.at_end("1.25", never) for env in envs))
    assert sorted(version for env in envs for version in env.measured) == ["1.0", "1.10", "1.20", "1.25"]


async def test_who_comes_while_another_evaluates_leaves_it_to_that(api: Client) -> None:
    busy, late = Environment(api, "a"), Environment(api, "b")
    busy.may_end.clear()
    async with asyncio.TaskGroup() as tasks:
        busy.evaluations.see("1.0", never, tasks)
        await busy.begun.wait()
        await late.sees("1.3")
        busy.may_end.set()
    assert (busy.measured, late.measured) == (["1.0"], [])


async def test_a_restart_repeats_only_its_own_unfinished_evaluation(api: Client) -> None:
    first = Environment(api, "a")
    first.may_end.clear()
    with pytest.raises(asyncio.TimeoutError):
        async with asyncio.timeout(2.5):
            await first.sees("1.0")
    assert first.measured == ["1.0"]
    other, again = Environment(api, "b"), Environment(api, "a")
    await other.sees("1.2")
    await again.sees("1.2", "1.3")
    assert (other.measured, again.measured) == ([], ["1.2"])
    await Environment(api, "a").sees("1.4")
    assert await steps(api) == [2]


async def test_a_claim_of_a_process_of_this_machine_that_has_ended_holds_nobody_up(api: Client) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:  # noqa: ASYNC220  it begins at once
        killed, other = Environment(api, holder_name(process.pid)), Environment(api, holder_name())
        killed.may_end.clear()
        with pytest.raises(asyncio.TimeoutError):
            async with asyncio.timeout(2.5):
                await killed.sees("1.0")
        await other.sees("1.2")
        assert other.measured == [], "the process lives"
        process.kill()
    again = Environment(api, holder_name())
    await again.sees("1.3")
    assert (again.measured, await steps(api)) == (["1.3"], [3])


@pytest.mark.parametrize(
    ("handling", "room", "held_up"),
    [(EvalHandling.STOP_TRAIN, 0, True), (EvalHandling.LIMIT_TRAIN, 4, False), (EvalHandling.NONE, 16, False)],
)
async def test_rollouts_while_evaluating(api: Client, handling: EvalHandling, room: int, held_up: bool) -> None:
    env = Environment(api, "a", handling)
    env.may_end.clear()
    assert env.evaluations.room(16) == 16
    async with asyncio.TaskGroup() as tasks:
        env.evaluations.see("1.0", never, tasks)
        assert env.evaluations.room(16) == room
        begins = tasks.create_task(env.evaluations.may_begin())
        await env.begun.wait()
        assert begins.done() != held_up
        env.may_end.set()
    assert env.evaluations.room(16) == 16


async def test_a_limit_leaves_at_least_one_worker(api: Client) -> None:
    env = Environment(api, "a", EvalHandling.LIMIT_TRAIN)
    async with asyncio.TaskGroup() as tasks:
        env.evaluations.see("1.0", never, tasks)
        assert env.evaluations.room(2) == 1


async def test_figures_that_the_api_refuses_cost_neither_the_run_nor_a_second_evaluation(
    api: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a reward whose name no metric may have. They are in the run's folder."""
    env = Environment(api, "a")
    env.rewards = {"längd": NOTHING}
    await env.sees("1.0")
    await env.evaluations.at_end("1.0", never)
    assert (env.measured, await steps(api)) == (["1.0"], [])
    assert "the API takes no figures of the evaluation in nowhere" in caplog.text
    env.rewards = {}
    await env.sees("1.10")
    assert (env.measured, await steps(api)) == (["1.0", "1.10"], [10])
