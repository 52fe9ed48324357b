"""Rewards that hang, compute without end, block their process or end it: exactly the affected samples get an error."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from tests.support.grids import rest_is_long
from tests.unit.env.rewards.running import misbehaving
from tests.unit.env.rewards.running.misbehaving import BAD, GOOD, GROUP, Make, Waiting, fine, fine_async

from gristmill_env.rewards import Execution, Sample, Scorer, WeightedReward, create_reward
from gristmill_env.running import code_process
from gristmill_env.running.limiter import Limits

pytestmark = pytest.mark.slow

Hosted = Callable[..., Scorer]


@pytest.fixture
async def hosted(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Hosted]:
    """Makes scorers of functions of misbehaving.py, which run in one process."""
    monkeypatch.setattr(code_process, "GRACE", 0.5)
    made: list[Scorer] = []

    def make(*names: str, cpu: float = 600, wall: float = 600) -> Scorer:
        rewards = [WeightedReward(create_reward(f"{misbehaving.__name__}:{name}"), 1.0) for name in names]
        made.append(Scorer(rewards, has_answer=True, execution=Execution(Limits(cpu, wall))))
        return made[-1]

    yield make
    for one in made:
        await one.close()


@pytest.mark.parametrize(
    ("name", "limits", "code"),
    rest_is_long(
        ("sleeps", {"wall": 1.0}, "call_overran"),
        ("blocks", {"cpu": 3.0}, "loop_blocked"),
        ("dies", {}, "process_died"),
        ("waits", {"wall": 1.0}, "call_overran"),
        ("spins", {"cpu": 2.0}, "call_overran"),
        ("holds_the_lock", {"cpu": 3.0}, "call_overran"),
        ("blocks_in_a_task", {"cpu": 3.0}, "loop_blocked"),
    ),
)
async def test_reward_that_hangs_or_ends_its_process_is_an_error_of_its_sample_alone(
    hosted: Hosted, name: str, limits: dict[str, float], code: str
) -> None:
    made = hosted(name, "fine", "fine_async", **limits)
    scores = await made.score(GROUP)
    assert [score.total for score in scores] == [3.0, None, 3.0, 3.0]
    failure = scores[1].failed[name]
    assert [failure.code, *(failure.values["seconds"] for _ in limits)] == [code, *limits.values()]
    assert made.errors == {name: 1}
    assert [score.total for score in await made.score([GOOD, GOOD])] == [3.0, 3.0]


async def test_run_continues_however_many_calls_hang(hosted: Hosted) -> None:
    made = hosted("sleeps", "where", wall=2.0)
    for _ in range(2):
        before = (await made.score([GOOD]))[0].parts["where"]
        scores = await made.score([BAD] * 20)
        assert {score.failed["sleeps"].code for score in scores} == {"call_overran"}
        while (await made.score([GOOD]))[0].parts["where"] == before:  # until the process is replaced
            pass


@pytest.mark.long
async def test_other_calls_of_a_process_end_there_although_one_hangs(hosted: Hosted, tmp_path: Path) -> None:
    file = tmp_path / "file"
    made = hosted("waits_for_a_file", "spins", "where", cpu=3.0)
    pid = (await made.score([GOOD]))[0].parts["where"]
    waiting = asyncio.create_task(made.score([Sample(str(file))]))
    assert (await made.score([BAD]))[0].failed["spins"].code == "call_overran"
    while (await made.score([GOOD]))[0].parts["where"] == pid:  # until the process is replaced
        pass
    file.touch()
    assert (await waiting)[0].parts["waits_for_a_file"] == pid


@pytest.mark.parametrize("name", rest_is_long("sleeps", "waits"))
async def test_hanging_reward_does_not_delay_other_groups(hosted: Hosted, name: str) -> None:
    made = hosted(name)
    stuck = asyncio.create_task(made.score([BAD, GOOD]))
    for _ in range(50):
        assert all(score.error is None for score in await made.score([GOOD] * 4))
    assert not stuck.done()
    stuck.cancel()


@pytest.mark.parametrize("name", ["hangs", "hangs_async"])
async def test_function_of_this_process_that_hangs_is_an_error_of_its_sample_alone(
    scorer: Make, waiting: Waiting, name: str
) -> None:
    made = scorer(fine, getattr(waiting, name), fine_async, limits=Limits(cpu=600, wall=0.5))
    for scores in await asyncio.gather(*(made.score(GROUP) for _ in range(20))):
        assert [score.total for score in scores] == [3.0, None, 3.0, 3.0]
        assert scores[1].failed[name].code == "call_overran"


async def test_cancelled_score_cancels_its_async_calls(scorer: Make) -> None:
    begun, ended = asyncio.Event(), threading.Event()

    async def judge(completion: str) -> float:
        begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.set()
        return 1.0

    task = asyncio.create_task(scorer(judge).score([GOOD]))
    await begun.wait()
    task.cancel()
    assert await asyncio.to_thread(ended.wait, 60)


HANGS_AT_EXIT = """
import asyncio, time
from gristmill_env.rewards import Execution, Sample, Scorer, WeightedReward, create_reward
from gristmill_env.running.limiter import Limits
def hangs(completion): time.sleep(1000)
async def waits(completion): await asyncio.Event().wait()
async def main():
    rewards = [WeightedReward(create_reward(function), 1.0) for function in (hangs, waits)]
    async with Scorer(rewards, has_answer=True, execution=Execution(Limits(0.1, 0.1))) as scorer:
        [score] = await scorer.score([Sample("")])
        print({name: failure.code for name, failure in score.failed.items()})
asyncio.run(main())
"""


def test_a_process_ends_although_a_reward_hangs() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS_AT_EXIT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert done.stdout.strip() == "{'hangs': 'call_overran', 'waits': 'call_overran'}"
