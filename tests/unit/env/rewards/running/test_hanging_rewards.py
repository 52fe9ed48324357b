"""Rewards that hang, spin or block their loop: exactly the affected samples get an error, and nothing else waits."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

import pytest
from tests.support.errors import raises
from tests.unit.env.rewards.running.misbehaving import BAD, GOOD, GROUP, Make, Waiting, fine, fine_async

from gristmill_env.errors import RewardError
from gristmill_env.running import Limits, runner

pytestmark = pytest.mark.slow


def spins(completion: str) -> float:
    while completion == "bad":
        pass
    return 1.0


async def spins_async(completion: str) -> float:
    return spins(completion)


HANGS = {
    "hangs": "call_overran",
    "hangs_async": "call_overran",
    "blocks": "loop_blocked",
    "blocks_in_a_task": "loop_blocked",
    "spins": "call_overran",
    "spins_async": "loop_blocked",
}


@pytest.mark.parametrize("name", HANGS)
async def test_hanging_reward_gives_an_error_only_for_its_sample(scorer: Make, waiting: Waiting, name: str) -> None:
    reward = {"spins": spins, "spins_async": spins_async}.get(name) or getattr(waiting, name)
    made = scorer(fine, reward, fine_async, timeout=0.3)
    scores = await made.score(GROUP)
    assert [sorted(score.failed) for score in scores] == [[], [name], [], []]
    failure = scores[1].failed[name]
    # Either limit: a spinning reward uses up both of its limits at nearly the same time.
    assert (failure.code, failure.values["seconds"]) == (HANGS[name], 0.3)
    assert scores[1].error == str(failure)
    assert [score.total for score in scores] == [3.0, None, 3.0, 3.0]
    assert made.errors == {name: 1}


def computes(completion: str) -> float:
    for _ in range(10):
        until = time.thread_time() + 0.1
        while time.thread_time() < until:
            pass
        time.sleep(0.2)  # Other threads and processes have the processor.
    return 1.0


async def computes_async(completion: str) -> float:
    return computes(completion)


@pytest.mark.parametrize("reward", [computes, computes_async])
async def test_reward_limit_does_not_count_time_without_the_processor(
    scorer: Make, reward: Callable[[str], object]
) -> None:
    made = scorer(reward, limits=Limits(cpu=1.9, wall=600.0))
    [score] = await made.score([GOOD])
    assert score.error is None


@pytest.mark.parametrize("reward", [spins, spins_async])
async def test_reward_that_computes_is_limited_by_processor_time(scorer: Make, reward: Callable[[str], object]) -> None:
    made = scorer(reward, limits=Limits(cpu=0.3, wall=600.0))
    scores = await made.score(GROUP)
    assert [score.error is None for score in scores] == [True, False, True, True]
    code = HANGS[reward.__name__]
    assert scores[1].failed[reward.__name__].code == code
    if code == "call_overran":
        assert scores[1].failed[reward.__name__].values == {"limit": "cpu", "seconds": 0.3}


async def waits_a_while(completion: str) -> float:
    await asyncio.sleep(0.8)
    return 1.0


def sleeps_a_while(completion: str) -> float:
    time.sleep(0.8)
    return 1.0


@pytest.mark.parametrize("reward", [waits_a_while, sleeps_a_while])
async def test_reward_that_waits_is_limited_by_wall_time_alone(scorer: Make, reward: Callable[[str], object]) -> None:
    assert [score.error for score in await scorer(reward, limits=Limits(cpu=0.1, wall=600.0)).score([GOOD])] == [None]
    [score] = await scorer(reward, limits=Limits(cpu=600.0, wall=0.2)).score([GOOD])
    failure = score.failed[reward.__name__]
    assert (failure.code, failure.values) == ("call_overran", {"limit": "wall", "seconds": 0.2})


async def test_cancelled_score_cancels_its_async_calls(scorer: Make) -> None:
    ended = threading.Event()

    async def judge(completion: str) -> float:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.set()
        return 1.0

    task = asyncio.create_task(scorer(judge).score([GOOD]))
    await asyncio.sleep(0.2)
    task.cancel()
    assert await asyncio.to_thread(ended.wait, 30)


async def test_thread_is_not_interrupted_inside_of_the_standard_library(
    scorer: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception there could leave a lock of logging locked forever."""
    logger = logging.getLogger("test.endless")
    inside: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            try:
                until = time.monotonic() + 1.0
                while time.monotonic() < until:
                    record.getMessage()
            except SystemExit:
                inside.append("interrupted while the handler's lock is held")
                raise

    handler = Handler()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    reached = threading.Event()

    def logs(completion: str) -> float:
        logger.info("for a while")
        reached.set()
        while True:  # here it is interrupted
            pass

    made = scorer(logs, limits=Limits(cpu=0.2, wall=0.2))
    [score] = await made.score([GOOD])
    assert score.error is not None
    thread = next(thread for thread in threading.enumerate() if thread.name == "call")
    assert await asyncio.to_thread(reached.wait, 30)
    await asyncio.to_thread(thread.join, 30)
    assert not thread.is_alive()
    assert inside == []
    logger.removeHandler(handler)


async def test_thread_is_interrupted_in_code_of_the_reward_only(scorer: Make) -> None:
    """An exception in an event loop or in a worker could leave a lock or a count of theirs in a wrong state."""
    interrupted: dict[str, bool] = {}

    def notes(completion: str) -> float:
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            interrupted[str(frame.f_globals.get("__name__"))] = runner._in_own_code(frame)
            frame = frame.f_back
        return 1.0

    async def notes_async(completion: str) -> float:
        return notes(completion)

    await scorer(notes).score([GOOD])
    assert interrupted[__name__]
    assert not interrupted["gristmill_env.running.threads"]
    interrupted.clear()
    await scorer(notes_async).score([GOOD])
    assert interrupted[__name__]
    assert not interrupted["gristmill_env.running.threads"]
    assert not interrupted["asyncio.events"]


@pytest.mark.parametrize("name", ["hangs", "hangs_async", "blocks"])
async def test_hanging_reward_does_not_delay_other_groups_or_the_callers_loop(
    scorer: Make, waiting: Waiting, name: str
) -> None:
    """The scorer scores fifty groups, by rewards of both kinds, while one reward still hangs. No group waits for that
    reward's deadline.

    No other group waits for the other rewards of the hanging group either.
    """
    made = scorer(fine, getattr(waiting, name))
    stuck = asyncio.create_task(made.score([BAD, GOOD]))
    await asyncio.to_thread(waiting.begun.acquire)
    others = scorer(fine, fine_async) if name == "blocks" else made
    for _ in range(50):
        assert all(score.error is None for score in await others.score([GOOD] * 4))
    assert not stuck.done()
    stuck.cancel()


@pytest.mark.parametrize("name", ["blocks", "spins_async"])
async def test_calls_on_a_blocked_loop_are_repeated(scorer: Make, waiting: Waiting, name: str) -> None:
    """Also if the blocked thread can be freed at once, and so cancels the calls itself."""
    called: list[str] = []

    async def judge(completion: str) -> float:
        called.append(completion)
        if len(called) <= 2:
            await asyncio.get_running_loop().create_future()  # only the blocked loop could finish this
        await asyncio.sleep(0.05)
        return 1.0

    made = scorer(judge, spins_async if name == "spins_async" else waiting.blocks, timeout=0.3)
    scores = await made.score([BAD, GOOD])
    assert [score.parts["judge"] for score in scores] == [1.0, 1.0]
    assert [score.error is None for score in scores] == [False, True]
    assert sorted(called) == ["bad", "bad", "good", "good"]
    # From now on the reward blocks a separate loop: a waiting judge is not started a second time.
    called[:] = ["", ""]
    assert [score.parts["judge"] for score in await made.score([BAD, GOOD])] == [1.0, 1.0]
    assert called[2:] == ["bad", "good"]


async def test_scorer_restarts_a_stopped_loop(scorer: Make) -> None:
    async def stops(completion: str) -> float:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0)
        return 1.0

    made = scorer(stops)
    assert [score.total for score in await made.score(GROUP)] == [1.0] * 4


async def test_temporarily_blocked_loop_fails_no_sample(scorer: Make) -> None:
    """The results for the other rewards arrive while the loop is blocked, and are seen only after their deadline."""

    async def blocks_for_a_while(completion: str) -> float:
        await asyncio.sleep(2.0)
        time.sleep(2.0)  # noqa: ASYNC251
        return 1.0

    async def waits(completion: str) -> float:
        await asyncio.sleep(2.1)
        return 1.0

    made = scorer(blocks_for_a_while, waits, timeout=3.0)
    assert [score.failed for score in await made.score([GOOD])] == [{}]


async def test_blocked_interpreter_fails_no_sample(scorer: Make) -> None:
    def holds_the_lock(completion: str) -> float:
        if completion == "bad":
            ctypes.PyDLL(None).usleep(1_500_000)  # PyDLL: the interpreter's lock is not released
        return 1.0

    async def waits(completion: str) -> float:
        await asyncio.sleep(0.2)
        return 1.0

    def waits_too(completion: str) -> float:
        time.sleep(0.2)
        return 1.0

    made = scorer(waits, waits_too, holds_the_lock, timeout=0.5)
    assert [score.failed for score in await made.score(GROUP)] == [{}] * 4


async def test_threads_that_spin_are_reclaimed(scorer: Make) -> None:
    made = scorer(spins, timeout=0.1)
    for _ in range(runner.MOST_HANGING + 2):  # more than may hang: none of them hangs forever
        [score] = await made.score([BAD])
        assert score.error is not None
    [score] = await made.score([GOOD])
    assert score.total == 1.0


@pytest.mark.parametrize("name", ["hangs", "blocks"])
async def test_too_many_threads_that_hang_end_the_run(
    scorer: Make, waiting: Waiting, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "MOST_HANGING", 3)
    made = scorer(getattr(waiting, name), fine, timeout=0.1)
    for _ in range(3):
        [score] = await made.score([BAD])
        assert score.error is not None
    with raises(RewardError, "too_many_hanging", name=name, threads=4):
        await made.score([BAD])
    with raises(RewardError, "too_many_hanging", name=name, threads=4):
        await made.score([GOOD])


HANGS_AT_EXIT = """
import asyncio, time
from gristmill_env.rewards import Execution, Sample, Scorer, WeightedReward, create_reward
from gristmill_env.running import Limits
def hangs(completion): time.sleep(1000)
async def blocks(completion): time.sleep(1000)
async def main():
    rewards = [WeightedReward(create_reward(function), 1.0) for function in (hangs, blocks)]
    async with Scorer(rewards, has_answer=True, execution=Execution(Limits(0.1, 0.1))) as scorer:
        [score] = await scorer.score([Sample("")])
        print({name: failure.code for name, failure in score.failed.items()})
asyncio.run(main())
"""


def test_a_process_ends_although_a_reward_hangs() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS_AT_EXIT], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout.strip() == "{'hangs': 'call_overran', 'blocks': 'loop_blocked'}"
