"""Rewards of a user in processes: the same scores as in this process, and a process's cost and memory."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.errors import raises

from gristmill.internal.logs import LineFormatter
from gristmill.internal.redaction import remember
from gristmill_env.answers.symbolic_pool import symbolic_pool
from gristmill_env.errors import RewardError
from gristmill_env.rewards import Execution, Sample, Scorer, WeightedReward, create_reward, reward
from gristmill_env.rewards.registry import _REGISTRY
from gristmill_env.run_settings import RunSettings
from gristmill_env.running.limiter import Limits
from gristmill_env.session import Task
from gristmill_env.settings.dataset import RewardSpec
from gristmill_env.settings.run import EnvConfig

pytestmark = pytest.mark.slow

CODE = """
import asyncio, os, sys, threading
from gristmill_env.errors import RewardError
from gristmill_env.rewards import RewardResult, reward

def words(completion: str, *, most: int = 10) -> float:
    return min(most, len(completion.split()))

def where(completion: str) -> float:
    print("not a report")
    return os.getpid()

async def where_async(completion: str) -> float:
    return os.getpid()

def longest(completions: list[str], level: str) -> list[float]:
    assert level == "hard"
    return [float(len(text) == max(map(len, completions))) for text in completions]

async def judged(completion: str, answer: str) -> float | None:
    await asyncio.sleep(0)
    return None if completion == "silent" else float(answer in completion)

def detailed(completion: str) -> RewardResult:
    return RewardResult(0.5, {"short": 1.0, "polite": ValueError("no idea")})

def fails(completion: str, *, key: str = "") -> float:
    raise KeyError(completion + key)

def refuses(completions: list[str]) -> list[float | Exception]:
    error = RewardError("picture_missing", "no picture", path="a.png", sizes=[1, 2])
    return [RewardResult(1.0, {"picture": error}) if text == "silent" else error for text in completions]

def counts_tokens(tokens) -> float:
    return len(tokens)

def trl(completions, completion_ids, level, **kwargs):
    return [float(len(text) + len(ids)) for text, ids in zip(completions, completion_ids)]

TOGETHER = threading.Barrier(16)

def meets(completion: str) -> float:
    TOGETHER.wait(60)
    return 1.0

class OnlyHere:
    def __init__(self):
        if "gristmill_env.running.host" in sys.orig_argv:
            raise OSError("not in another process")
    def __call__(self, completion: str) -> float:
        return 1.0

class OnlyThere:
    def __init__(self):
        if "gristmill_env.running.host" not in sys.orig_argv:
            raise OSError("in another process only")
    async def __call__(self, completion: str) -> float:
        return 1.0

class Counts:
    def __init__(self, *, start: int):
        self.seen = start
    def __call__(self, completions: list[str]) -> list[float]:
        self.seen += 1
        return [self.seen for _ in completions]

def place(completion, row):
    if completion == "exits":
        sys.exit(1)
    return chr(0xD83D) if completion == "half" else str(os.getpid())

@reward("tests_placed", extract_answer=place)
def placed(completion: str, answer: str) -> float:
    return 1.0
"""
SAMPLES = [
    Sample(text, answer="5", tokens=(1, 2), row={"level": "hard", "picture": object})
    for text in ("one 5", "silent", "a b c d")
]

Make = Callable[..., Scorer]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the code above, which registers a reward."""
    made = tmp_path_factory.mktemp("rewards")
    (made / "code.py").write_text(CODE)
    yield made
    _REGISTRY.pop("tests_placed", None)


@pytest.fixture
async def scorer(folder: Path) -> AsyncIterator[Make]:
    """Makes scorers of the code above."""
    made: list[Scorer] = []

    def make(*specs: dict[str, Any] | str, here: bool = False) -> Scorer:
        rewards = [create_reward(spec, folder=folder) for spec in specs]
        if here:
            rewards = [reward.here() for reward in rewards]
        weighted = [WeightedReward(reward, 1.0) for reward in rewards]
        made.append(Scorer(weighted, has_answer=True, columns=["level", "picture"], execution=Execution(processes=1)))
        return made[-1]

    yield make
    for one in made:
        await one.close()


async def test_scores_and_errors_are_the_same_as_in_this_process(scorer: Make) -> None:
    specs = [
        {"type": "code.py:words", "params": {"most": 3}}, "code.py:longest", "code.py:judged", "code.py:detailed",
        "code.py:fails", "code.py:refuses", "trl:code.py:trl", "code.py:counts_tokens",
        {"type": "code.py:Counts", "params": {"start": 3}},
    ]  # fmt: skip
    there, here = await scorer(*specs).score(SAMPLES), await scorer(*specs, here=True).score(SAMPLES)
    assert there == here
    whole, part = there[0].failed["refuses"], there[1].failed["refuses/picture"]
    for failure in (whole, part):
        assert (failure.code, failure.values) == ("picture_missing", {"path": "a.png", "sizes": [1, 2]})
    assert (there[0].failed["fails"].code, there[0].failed["fails"].values) == ("reward_raised", {"error": "KeyError"})


async def test_first_error_is_logged_with_its_traceback_and_without_secrets(
    scorer: Make, caplog: pytest.LogCaptureFixture
) -> None:
    remember("very-secret-word")
    made = scorer({"type": "code.py:fails", "params": {"key": "very-secret-word"}})
    with caplog.at_level(logging.ERROR):
        [score] = await made.score(SAMPLES[:1])
    logged = "\n".join(map(LineFormatter().format, caplog.records))
    assert "code.py" in logged
    assert "in fails" in logged
    assert "very-secret-word" not in logged + score.failed["fails"].text


async def test_code_that_cannot_be_loaded_in_its_process_ends_the_start(scorer: Make) -> None:
    with raises(RewardError, "reward_not_made", reward="OnlyHere"):
        await scorer("code.py:OnlyHere").start()
    [score] = await scorer("code.py:OnlyHere").score(SAMPLES[:1])
    assert score.failed["OnlyHere"].code == "reward_not_made"


async def test_instance_of_a_class_is_made_where_it_is_called(scorer: Make) -> None:
    made = scorer("code.py:OnlyThere", {"type": "combined", "params": {"rewards": ["code.py:OnlyThere"]}})
    assert [score.total for score in await made.score(SAMPLES)] == [2.0] * 3
    with raises(RewardError, "reward_not_made", reward="OnlyThere"):
        made.rewards[0].reward.score(["text"])


async def test_rewards_of_a_user_share_a_process_and_its_state_until_the_scorer_closes(scorer: Make) -> None:
    alone = {"type": "code.py:where", "name": "alone", "process": True}
    made = scorer("code.py:where", "code.py:where_async", alone, {"type": "code.py:Counts", "params": {"start": 1}})
    await made.start()
    parts = [dict(score.parts) for _ in range(2) for score in await made.score(SAMPLES)]
    pids = {(part["where"], part["where_async"]) for part in parts}
    own = {part["alone"] for part in parts}
    assert [part["Counts"] for part in parts] == [2, 2, 2, 3, 3, 3]
    ((pid, same),), (other,) = pids, own
    assert pid == same
    assert len({pid, other, os.getpid()}) == 3
    await made.close()
    for ended in (pid, other):
        with pytest.raises(ProcessLookupError):
            os.kill(int(ended or 0), 0)
    with raises(RewardError, "scorer_closed"):
        await made.score(SAMPLES)


async def test_plain_calls_of_a_group_run_at_the_same_time(scorer: Make) -> None:
    assert [score.total for score in await scorer("code.py:meets").score([Sample("")] * 16)] == [1.0] * 16


async def test_a_cancelled_score_leaves_the_process_running(scorer: Make) -> None:
    made = scorer("code.py:where", "code.py:meets")
    alone = scorer("code.py:where")
    task = asyncio.create_task(made.score([Sample("")] * 3))  # too few to meet
    [before] = await alone.score([Sample("")])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    [after] = await alone.score([Sample("")])
    assert before.total == after.total


async def test_answers_are_extracted_where_the_reward_runs(scorer: Make) -> None:
    made = scorer("code.py:placed")
    first, second, half, exits = await made.extracted(["a", "b", "half", "exits"], {})
    assert first == second
    assert half == "\N{REPLACEMENT CHARACTER}"
    assert str(first).isdigit()
    assert first != str(os.getpid())
    assert isinstance(exits, RewardError)
    assert exits.code == "reward_raised"


def test_built_in_rewards_and_functions_of_this_process_are_called_here() -> None:
    try:

        @reward("tests_local")
        def own(completion: str) -> float:
            return 1.0

        for made in ("accuracy", "r1", {"type": "length", "process": True}, own, "tests_local"):
            assert {leaf.source for leaf in create_reward(made).leaves().values()} == {None}
    finally:
        _REGISTRY.pop("tests_local", None)


async def test_registered_reward_of_a_file_runs_in_the_process_too(scorer: Make) -> None:
    scorer("code.py:words")  # the file is loaded
    made = scorer("tests_placed")
    assert (await made.score(SAMPLES))[0].total == 1.0
    (pid,) = await made.extracted(["text"], {})
    assert pid not in (None, str(os.getpid()))


def test_process_option_is_allowed_only_on_the_parts_of_a_composed_reward(folder: Path) -> None:
    with raises(RewardError, "composed_in_process", reward="r1"):
        create_reward({"type": "r1", "process": True})
    part = {"type": "code.py:words", "process": True}
    made = create_reward({"type": "combined", "params": {"rewards": [part, "length"]}}, folder=folder)
    assert [leaf.source is not None and leaf.source.alone for leaf in made.leaves().values()] == [True, False]


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
