"""Rewards with `process: true`: the same scores as without, and calls that can always be killed."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.errors import raises

from gristmill_env.answers.symbolic_pool import symbolic_pool
from gristmill_env.errors import RewardError
from gristmill_env.rewards import Execution, Sample, Score, Scorer, WeightedReward, create_reward
from gristmill_env.run_settings import RunSettings
from gristmill_env.running import Limits
from gristmill_env.session import Task
from gristmill_env.settings import EnvConfig, RewardSpec

pytestmark = pytest.mark.slow

CODE = """
import asyncio, os, re, sys, time
from gristmill_env.errors import RewardError
from gristmill_env.rewards import RewardResult

def words(completion: str, *, most: int = 10) -> float:
    return min(most, len(completion.split()))

def where(completion: str) -> float:
    return os.getpid()

def longest(completions: list[str], level: str) -> list[float]:
    assert level == "hard"
    return [float(len(text) == max(map(len, completions))) for text in completions]

async def judged(completion: str, answer: str) -> float | None:
    await asyncio.sleep(0)
    return None if completion == "silent" else float(answer in completion)

def detailed(completion: str) -> RewardResult:
    return RewardResult(0.5, {"short": 1.0, "polite": ValueError("no idea")})

def fails(completion: str) -> float:
    raise KeyError(completion)

def refuses(completions: list[str]) -> list[float | Exception]:
    error = RewardError("picture_missing", "no picture", path="a.png", sizes=[1, 2])
    return [RewardResult(1.0, {"picture": error}) if text == "silent" else error for text in completions]

def stuck(completion: str) -> float:
    if completion == "bad":
        re.match("(a+)+$", "a" * 60 + "b")
    return 1.0

def sleeps(completion: str) -> float:
    time.sleep(600 if completion == "bad" else 0)
    return 1.0

def naps(completion: str) -> float:
    time.sleep(0.4)
    return 1.0

def trl(completions, level, **kwargs):
    return [float(len(text)) for text in completions]

class OnlyHere:
    def __init__(self):
        if "gristmill_env.running.child" in sys.orig_argv:
            raise OSError("not in a worker process")
    def __call__(self, completion: str) -> float:
        return 1.0

class Counts:
    def __init__(self, *, start: int):
        self.seen = start
    def __call__(self, completion: str) -> float:
        self.seen += 1
        return self.seen
"""
SAMPLES = [
    Sample(text, answer="5", row={"level": "hard", "picture": object}) for text in ("one 5", "silent", "a b c d")
]

Make = Callable[..., Scorer]


@pytest.fixture
async def scorer(tmp_path: Path) -> AsyncIterator[Make]:
    """Makes scorers of the code above."""
    (tmp_path / "code.py").write_text(CODE)
    made: list[Scorer] = []

    def make(*specs: dict[str, Any], limits: Limits | None = None) -> Scorer:
        rewards = [WeightedReward(create_reward(spec, folder=tmp_path), 1.0) for spec in specs]
        how = Execution(limits or Limits(60.0, 600.0), processes=1)
        columns = ["level", "picture"]
        made.append(Scorer(rewards, has_answer=True, columns=columns, execution=how))
        return made[-1]

    yield make
    for one in made:
        await one.close()


async def _both(make: Make, reward: str, **params: Any) -> tuple[list[Score], list[Score]]:
    spec = {"type": reward, "params": params, "name": "it"}
    there, here = make({**spec, "process": True}), make(spec)
    return await there.score(SAMPLES), await here.score(SAMPLES)


@pytest.mark.parametrize(
    ("reward", "params"),
    [
        ("code.py:words", {"most": 3}), ("code.py:longest", {}), ("code.py:judged", {}), ("code.py:detailed", {}),
        ("code.py:fails", {}), ("code.py:refuses", {}), ("trl:code.py:trl", {}),
        ("code.py:Counts", {"start": 3}), ("accuracy", {}),
    ],
)  # fmt: skip
async def test_scores_are_the_same_as_without_a_process(scorer: Make, reward: str, params: dict[str, Any]) -> None:
    there, here = await _both(scorer, reward, **params)
    assert there == here


async def test_errors_keep_their_codes_and_values_across_the_process_boundary(scorer: Make) -> None:
    there, _ = await _both(scorer, "code.py:refuses")
    whole, part = there[0].failed["it"], there[1].failed["it/picture"]
    for failure in (whole, part):
        assert (failure.code, failure.values) == ("picture_missing", {"path": "a.png", "sizes": [1, 2]})
    raising, _ = await _both(scorer, "code.py:fails")
    assert raising[0].failed["it"].code == "reward_raised"
    assert raising[0].failed["it"].values == {"error": "KeyError"}
    lost = scorer({"type": "code.py:OnlyHere", "process": True})
    [score] = await lost.score([Sample("")])
    assert score.failed["OnlyHere"].code == "reward_not_made"


async def test_process_reward_runs_in_another_process_until_the_scorer_closes(scorer: Make) -> None:
    made = scorer({"type": "code.py:where", "process": True})
    (pid,) = {score.total for score in await made.score(SAMPLES)}
    assert pid not in (None, os.getpid())
    await made.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid or 0), 0)


@pytest.mark.parametrize(
    ("reward", "limits"), [("code.py:stuck", Limits(1.0, 600.0)), ("code.py:sleeps", Limits(60.0, 2.0))]
)
async def test_process_reward_kills_an_overrunning_call_and_fails_only_its_sample(
    scorer: Make, reward: str, limits: Limits
) -> None:
    made = scorer({"type": reward, "process": True}, limits=limits)
    scores = await made.score([Sample("good"), Sample("bad"), Sample("good")])
    assert [score.error is None for score in scores] == [True, False, True]
    (failure,) = scores[1].failed.values()
    assert (failure.code, failure.values["job"]) == ("job_overran", "the call")


async def test_waiting_for_a_process_is_not_the_calls_own_time(scorer: Make) -> None:
    """Ten calls queue for one process: all together they take longer than one call may take."""
    made = scorer({"type": "code.py:naps", "process": True}, limits=Limits(60.0, 2.0))
    assert all(score.error is None for score in await made.score([Sample(str(n)) for n in range(10)]))


def test_process_option_is_allowed_only_on_the_parts_of_a_composed_reward(scorer: Make) -> None:
    with raises(RewardError, "composed_in_process", reward="r1"):
        scorer({"type": "r1", "process": True})
    part = {"type": "code.py:words", "process": True}
    scorer({"type": "combined", "params": {"rewards": [part, "length"]}})


def test_process_option_of_a_reward_is_not_recorded() -> None:
    assert RewardSpec(type="length", process=True).recorded() == RewardSpec(type="length").recorded()
    assert "process" not in RewardSpec(type="length").model_dump(mode="json")


async def test_settings_set_limits_and_sizes(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    flags = (
        f"--dataset_path {tmp_path}/rows.jsonl --answer_field answer --reward_functions accuracy --reward_timeout 7 "
        "--reward_wall_timeout 70 --reward_threads 3 --reward_processes 4 --check_timeout 5 --check_processes 3"
    )
    launch = RunSettings.read(flags.split(), {"GRISTMILL_MODELS_DIR": "/nowhere"}, "test")
    async with Task.load(launch).scorer as made:
        assert made.execution == Execution(Limits(7.0, 70.0), threads=3, processes=4)
        assert (symbolic_pool().size, symbolic_pool().limits) == (3, Limits(5.0, 100.0))
        assert [score.total for score in await made.score([Sample("\\boxed{\\sqrt{4}}", answer="2")])] == [1.0]
    assert launch.config.recorded("tiny") == EnvConfig(dataset=launch.config.dataset).recorded("tiny")
