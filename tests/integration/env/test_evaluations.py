"""When a run in training is evaluated, and by which process, against the real API."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from redis.asyncio import Redis
from tests.integration.env.conftest import TRAINER
from tests.support.api_server import ApiServer

from gristmill import Client, PolicyVersion, SamplingParams
from gristmill.permits import Slots
from gristmill_api.store import keys
from gristmill_env.errors import EnvError, EvaluationError, InferenceError, RewardError
from gristmill_env.evaluation import run as evaluation_run
from gristmill_env.evaluation.plan import Plan
from gristmill_env.evaluation.results import Evaluated, summarise
from gristmill_env.evaluation.run import RunEvaluations
from gristmill_env.inference.http import RefusedError
from gristmill_env.saved.summary import GroupStats, Values
from gristmill_env.settings.run import EnvConfig, EvalHandling
from gristmill_env.tracking import Observers

PLAN = Plan(
    task="sums", model="tiny", weights="1.0", dataset="sums", rows=0, prompts=0, samples=1,
    sampling=SamplingParams(temperature=0, max_tokens=8), max_length=64, decides="length", compares=False, settings={},
)  # fmt: skip


class Environment:
    """One environment of the run: its evaluations, and the versions that it measured."""

    def __init__(
        self, api: Client, holder: str, handling: EvalHandling = EvalHandling.STOP_TRAIN, workers: int = 16
    ) -> None:
        self.slots = Slots(workers)
        self.measured: list[str] = []
        self.stats = GroupStats()
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.error: Exception | None = None
        config = EnvConfig(max_num_workers=workers, steps_per_eval=10, eval_handling=handling, eval_limit_ratio=0.25)
        self.evaluations = RunEvaluations(config, "sums", holder, api, {None: self._measure}, Observers(), self.slots)

    async def sees(self, *versions: str) -> None:
        for version in versions:
            async with asyncio.TaskGroup() as tasks:
                self.evaluations.begin_if_due(PolicyVersion.parse(version), tasks)

    async def _measure(self, version: str) -> Evaluated:
        self.measured.append(version)
        self.begun.set()
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        summary = replace(summarise(PLAN, []), stats=self.stats)
        return Evaluated(PLAN, summary, Path("nowhere"), started=0, ended=1, resumed=0)


@pytest.fixture(autouse=True)
def _short_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation_run, "_TTL", 3.0)
    monkeypatch.setattr(evaluation_run, "_EVERY", 0.2)


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


async def test_run_is_evaluated_before_training_at_each_interval_and_at_the_end(api: Client) -> None:
    env = Environment(api, "a")
    await env.sees("1.0", "1.1", "1.9", "1.10", "1.12", "1.31", "1.35")
    await env.evaluations.at_end(PolicyVersion(1, 38))
    assert env.measured == ["1.0", "1.10", "1.31", "1.38"]
    assert await steps(api) == [0, 10, 31, 38]


async def test_the_last_version_is_not_evaluated_twice(api: Client) -> None:
    env = Environment(api, "a")
    await env.sees("1.0", "1.10")
    await env.evaluations.at_end(PolicyVersion(1, 10))
    assert env.measured == ["1.0", "1.10"]


async def test_only_one_of_several_environments_evaluates(api: Client) -> None:
    envs = [Environment(api, f"env-{number}") for number in range(4)]
    for version in ("1.0", "1.10", "1.20"):
        await asyncio.gather(*(env.sees(version) for env in envs))
    await asyncio.gather(*(env.evaluations.at_end(PolicyVersion(1, 25)) for env in envs))
    assert sorted(version for env in envs for version in env.measured) == ["1.0", "1.10", "1.20", "1.25"]


async def test_environments_continue_rollouts_while_another_evaluates(
    api: Client, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation_run, "_TTL", 60.0)
    busy, late = Environment(api, "a"), Environment(api, "b")
    busy.may_end.clear()
    async with asyncio.TaskGroup() as tasks, Redis.from_url(redis_url) as redis:
        busy.evaluations.begin_if_due(PolicyVersion(1, 0), tasks)
        await busy.begun.wait()
        late.evaluations.begin_if_due(PolicyVersion(1, 3), tasks)
        async with asyncio.timeout(30):
            await late.slots.opened()  # its own rollouts
        ends: set[float | None] = set()
        while len(ends) < 3:  # the claim is renewed
            ends.add(await redis.zscore(keys.prefix("sums") + "claims", "evaluation-0"))
            await asyncio.sleep(0.05)
        assert late.measured == []
        busy.may_end.set()
    assert (busy.measured, late.measured, await steps(api)) == (["1.0"], [], [0])


async def test_restarted_environment_resumes_its_claimed_evaluation_at_once(
    api: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation_run, "_TTL", 3600.0)
    await _dies_while_evaluating(Environment(api, "a"))
    again = Environment(api, "a")
    await again.sees("1.2", "1.3")
    await Environment(api, "a").sees("1.4")
    assert (again.measured, await steps(api)) == (["1.2"], [2])


async def test_expired_claim_of_a_dead_environment_lets_another_evaluate(api: Client) -> None:
    await _dies_while_evaluating(Environment(api, "a"))
    other = Environment(api, "b")
    async with asyncio.timeout(60):
        await other.sees("1.2")
    assert (other.measured, await steps(api)) == (["1.2"], [2])


async def test_evaluation_that_loses_its_claim_stops_until_the_claim_is_free(api: Client, redis_url: str) -> None:
    """Claims like the evaluation of a process that was stopped until its claim expired."""
    env = Environment(api, "a")
    env.may_end.clear()
    async with asyncio.TaskGroup() as tasks, Redis.from_url(redis_url) as redis:
        env.evaluations.begin_if_due(PolicyVersion(1, 0), tasks)
        await env.begun.wait()
        await redis.hset(keys.prefix("sums") + "claimants", "evaluation-0", "b")
        async with asyncio.timeout(30):
            await env.slots.opened()
        assert await steps(api) == []
        env.may_end.set()  # b does nothing, and its claim expires
    assert (env.measured, await steps(api)) == (["1.0", "1.0"], [0])


async def test_waiting_evaluation_is_cancelled_by_the_next_due_evaluation(api: Client) -> None:
    busy, late = Environment(api, "a"), Environment(api, "b")
    busy.may_end.clear()
    async with asyncio.TaskGroup() as tasks:
        busy.evaluations.begin_if_due(PolicyVersion(1, 0), tasks)
        await busy.begun.wait()
        waiting = late.evaluations.begin_if_due(PolicyVersion(1, 3), tasks)
        await late.slots.opened()
        next_one = late.evaluations.begin_if_due(PolicyVersion(1, 10), tasks)
        assert next_one is not None
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert late.slots.places == 0, "the end of the evaluation that waits opens no places"
        await next_one
        assert late.measured == ["1.10"]
        assert waiting is not None
        assert waiting.cancelled()
        busy.may_end.set()


@pytest.mark.parametrize(
    "error",
    [
        EvaluationError("output_unwritable", "the folder cannot be written"),
        OSError(errno.ENOSPC, "No space left"),
        RewardError("too_many_failures", "of a reward"),
        EnvError("too_many_hanging", "of an environment"),
        RefusedError("request_refused", "HTTP 400", text="", status=400),
        TypeError("of a reward's own code"),
    ],
)
async def test_an_evaluation_that_fails_does_not_end_the_training(
    api: Client, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    env = Environment(api, "a")
    env.error = error
    await env.sees("1.0")
    assert env.slots.places == 16
    failed = [record.args for record in caplog.records if record.levelname == "ERROR"]
    assert [(str(version), why) for version, why in failed] == [("1.0", error)]  # type: ignore[misc]
    env.error = None
    await env.sees("1.10")
    assert (env.measured, await steps(api)) == (["1.0", "1.10"], [10])


async def test_evaluation_raises_if_no_model_server_answers(api: Client) -> None:
    env = Environment(api, "a")
    env.error = InferenceError("no_server", "no server answers")
    with pytest.raises(ExceptionGroup):
        await env.sees("1.0")


async def _dies_while_evaluating(env: Environment) -> None:
    env.may_end.clear()
    dying = asyncio.create_task(env.sees("1.0"))
    await env.begun.wait()
    dying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dying
    assert env.measured == ["1.0"]


@pytest.mark.parametrize(
    ("handling", "room", "held_up"),
    [(EvalHandling.STOP_TRAIN, 0, True), (EvalHandling.LIMIT_TRAIN, 4, False), (EvalHandling.NONE, 16, False)],
)
async def test_eval_handling_decides_how_many_rollouts_run_during_an_evaluation(
    api: Client, handling: EvalHandling, room: int, held_up: bool
) -> None:
    env = Environment(api, "a", handling)
    env.may_end.clear()
    assert env.slots.places == 16
    async with asyncio.TaskGroup() as tasks:
        env.evaluations.begin_if_due(PolicyVersion(1, 0), tasks)
        assert env.slots.places == room
        begins = tasks.create_task(env.slots.opened())
        await env.begun.wait()
        assert begins.done() != held_up
        env.may_end.set()
    assert env.slots.places == 16


async def test_limited_training_keeps_at_least_one_worker_during_an_evaluation(api: Client) -> None:
    env = Environment(api, "a", EvalHandling.LIMIT_TRAIN, workers=2)
    async with asyncio.TaskGroup() as tasks:
        env.evaluations.begin_if_due(PolicyVersion(1, 0), tasks)
        assert env.slots.places == 1


async def test_metrics_refused_by_the_api_do_not_end_or_repeat_an_evaluation(
    api: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """A metric of a reward whose name is not valid for a metric. Such metrics are in the run's folder."""
    env = Environment(api, "a")
    env.stats = GroupStats(parts={"längd": Values()})
    await env.sees("1.0")
    await env.evaluations.at_end(PolicyVersion(1, 0))
    assert (env.measured, await steps(api)) == (["1.0"], [0])
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == [Path("nowhere")]
    env.stats = GroupStats()
    await env.sees("1.10")
    assert (env.measured, await steps(api)) == (["1.0", "1.10"], [0, 10])
