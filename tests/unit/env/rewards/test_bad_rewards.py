"""Rewards that misbehave: each ends as a counted error of exactly the samples concerned, and nothing else stops.

A reward here misbehaves on completions that say so, and is right on all others.
"""

from __future__ import annotations

import asyncio
import ctypes
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from gristmill_env.errors import RewardError
from gristmill_env.rewards import Sample, Scorer, WeightedReward, create_reward
from gristmill_env.rewards.running import runner, workers

BAD = Sample("bad")
GOOD = Sample("good")
GROUP = [GOOD, BAD, GOOD, GOOD]

Make = Callable[..., Scorer]


@pytest.fixture
async def scorer() -> AsyncIterator[Make]:
    """Makes a scorer of rewards, each of weight 1."""
    made: list[Scorer] = []

    def make(*rewards: Callable[..., Any], timeout: float = 60.0) -> Scorer:
        weighted = [WeightedReward(create_reward(function), 1.0) for function in rewards]
        made.append(Scorer(weighted, has_answer=True, timeout=timeout))
        return made[-1]

    yield make
    for one in made:
        await one.close()


def fine(completion: str) -> float:
    return 1.0


async def fine_async(completion: str) -> float:
    await asyncio.sleep(0)
    return 1.0


def returning(value: object) -> Callable[[str], object]:
    def reward(completion: str) -> object:
        return value if completion == "bad" else 1.0

    return reward


def raises(completion: str) -> float:
    if completion == "bad":
        raise KeyError("mark")
    return 1.0


def leaves(completion: str) -> float:
    if completion == "bad":
        sys.exit(3)
    return 1.0


async def raises_async(completion: str) -> float:
    await asyncio.sleep(0)
    return raises(completion)


async def cancels_itself(completion: str) -> float:
    if completion == "bad":
        raise asyncio.CancelledError
    return 1.0


def forgets_async(completion: str) -> object:
    return fine_async(completion) if completion == "bad" else 1.0


def group_with_a_nan(completions: list[str]) -> list[float]:
    return [float("nan") if completion == "bad" else 1.0 for completion in completions]


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        (raises, "raises: KeyError: 'mark'"),
        (raises_async, "raises_async: KeyError: 'mark'"),
        (leaves, "leaves: SystemExit: 3"),
        (cancels_itself, "cancels_itself: CancelledError: "),
        (forgets_async, "forgets_async: it returns an awaitable but is not `async def`"),
        (group_with_a_nan, "group_with_a_nan: a reward returns a finite number or None, not nan"),
        *[
            (returning(value), f"reward: a reward returns a finite number or None, not {value!r}")
            for value in (float("nan"), float("inf"), -float("inf"), "1", [1.0], 1j)
        ],
    ],
)
async def test_the_sample_it_fails_on_is_an_error_and_the_others_are_not(
    scorer: Make, reward: Callable[..., Any], told: str
) -> None:
    made = scorer(fine, reward, fine_async)
    scores = await made.score(GROUP)
    assert [score.total for score in scores] == [3.0, None, 3.0, 3.0]
    assert [score.error for score in scores] == [None, told, None, None]
    assert scores[1].parts == {"fine": 1.0, reward.__name__: None, "fine_async": 1.0}
    assert made.errors == {reward.__name__: 1}


@pytest.mark.parametrize("value", [True, 1, np.float32(1.0), np.int64(1), np.array(1.0)])
async def test_every_kind_of_number_is_a_value(scorer: Make, value: object) -> None:
    [score] = await scorer(returning(value)).score([BAD])
    assert score.total == 1.0
    assert type(score.total) is float


async def test_an_enormous_integer_is_an_error(scorer: Make) -> None:
    [score] = await scorer(returning(10**400)).score([BAD])
    assert score.error is not None


def too_few(completions: list[str]) -> list[float]:
    return [1.0] * (len(completions) - 1)


def too_many(completions: list[str]) -> list[float]:
    return [1.0] * (len(completions) + 1)


def one_for_all(completions: list[str]) -> float:
    return 1.0


async def raises_for_all(completions: list[str]) -> list[float]:
    raise ValueError("no")


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        (too_few, "it returned 3 values for 4 completions"),
        (too_many, "it returned 5 values for 4 completions"),
        (one_for_all, "a group-level reward returns a list, one value a completion, not 1.0"),
        (raises_for_all, "ValueError: no"),
    ],
)
async def test_a_group_level_failure_is_one_of_all_samples(scorer: Make, reward: Callable[..., Any], told: str) -> None:
    made = scorer(fine, reward)
    scores = await made.score(GROUP)
    assert [score.error for score in scores] == [f"{reward.__name__}: {told}"] * 4
    assert [score.parts["fine"] for score in scores] == [1.0] * 4
    assert made.errors == {reward.__name__: 4}


async def test_a_group_level_reward_may_give_an_array(scorer: Make) -> None:
    def array(completions: list[str]) -> Any:
        return np.arange(len(completions), dtype=np.float32)

    assert [score.total for score in await scorer(array).score(GROUP)] == [0, 1, 2, 3]


class Waiting:
    """Rewards that hang on a bad completion until the test lets them go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.begun = threading.Semaphore(0)

    def hangs(self, completion: str) -> float:
        if completion == "bad":
            self.begun.release()
            self.let_go.wait()
        return 1.0

    async def hangs_async(self, completion: str) -> float:
        if completion == "bad":
            self.begun.release()
            await asyncio.get_running_loop().create_future()
        return 1.0

    async def blocks(self, completion: str) -> float:
        if completion == "bad":
            self.begun.release()
            self.let_go.wait()  # in place of an await
        return 1.0

    async def blocks_in_a_task(self, completion: str) -> float:
        return await asyncio.create_task(self.blocks(completion))


@pytest.fixture
def waiting() -> Any:
    made = Waiting()
    yield made
    made.let_go.set()


def spins(completion: str) -> float:
    while completion == "bad":
        pass
    return 1.0


async def spins_async(completion: str) -> float:
    return spins(completion)


HANGS = {
    "hangs": "it took longer than 0.3 s",
    "hangs_async": "it took longer than 0.3 s",
    "blocks": "it blocked its event loop for 0.3 s; await what it waits for, or use def",
    "blocks_in_a_task": "it blocked its event loop for 0.3 s; await what it waits for, or use def",
    "spins": "it took longer than 0.3 s",
    "spins_async": "it blocked its event loop for 0.3 s; await what it waits for, or use def",
}


@pytest.mark.parametrize("name", HANGS)
async def test_a_reward_that_hangs_costs_its_own_sample(scorer: Make, waiting: Waiting, name: str) -> None:
    reward = {"spins": spins, "spins_async": spins_async}.get(name) or getattr(waiting, name)
    made = scorer(fine, reward, fine_async, timeout=0.3)
    scores = await made.score(GROUP)
    assert [score.error for score in scores] == [None, f"{name}: {HANGS[name]}", None, None]
    assert [score.total for score in scores] == [3.0, None, 3.0, 3.0]
    assert made.errors == {name: 1}


@pytest.mark.parametrize("name", ["hangs", "hangs_async", "blocks"])
async def test_other_groups_and_the_callers_loop_go_on_meanwhile(scorer: Make, waiting: Waiting, name: str) -> None:
    """Fifty groups are scored, by rewards of both kinds, while one still hangs; nothing waits for its deadline.

    The group's other rewards are not waited for by anybody else either.
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
async def test_calls_beside_one_that_blocks_the_loop_are_done_again(scorer: Make, waiting: Waiting, name: str) -> None:
    """Also where the blocked thread can be freed at once, and so cancels them itself."""
    called: list[str] = []

    async def judge(completion: str) -> float:
        called.append(completion)
        if len(called) <= 2:
            await asyncio.get_running_loop().create_future()  # what it waits for comes by the loop that is blocked
        await asyncio.sleep(0.05)
        return 1.0

    made = scorer(judge, spins_async if name == "spins_async" else waiting.blocks, timeout=0.3)
    scores = await made.score([BAD, GOOD])
    assert [score.parts["judge"] for score in scores] == [1.0, 1.0]
    assert [score.error is None for score in scores] == [False, True]
    assert sorted(called) == ["bad", "bad", "good", "good"]
    # From now on it blocks a loop of its own: a judge that waits is not begun a second time.
    called[:] = ["", ""]
    assert [score.parts["judge"] for score in await made.score([BAD, GOOD])] == [1.0, 1.0]
    assert called[2:] == ["bad", "good"]


async def test_a_stopped_loop_goes_on(scorer: Make) -> None:
    async def stops(completion: str) -> float:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0)
        return 1.0

    made = scorer(stops)
    assert [score.total for score in await made.score(GROUP)] == [1.0] * 4


async def test_a_loop_that_is_blocked_for_a_while_costs_nobody(scorer: Make) -> None:
    """What the others wait for comes while the loop is blocked, and is seen only after their deadline."""

    async def blocks_for_a_while(completion: str) -> float:
        await asyncio.sleep(2.8)
        time.sleep(1.0)  # noqa: ASYNC251
        return 1.0

    async def waits(completion: str) -> float:
        await asyncio.sleep(2.9)
        return 1.0

    made = scorer(blocks_for_a_while, waits, timeout=3.0)
    assert [score.failed for score in await made.score([GOOD])] == [{}]


async def test_a_process_that_stood_still_blames_nobody(scorer: Make) -> None:
    def holds_the_lock(completion: str) -> float:
        if completion == "bad":
            ctypes.PyDLL(None).usleep(1_500_000)  # PyDLL: the interpreter's lock is not let go
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
    for _ in range(runner.MOST_HANGING + 2):  # more than may hang: none of them does for good
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
    with pytest.raises(RewardError, match=f"reward '{name}' hangs: 4 threads are lost"):
        await made.score([BAD])
    with pytest.raises(RewardError, match=f"reward '{name}' hangs"):
        await made.score([GOOD])


async def test_a_reward_that_waits_has_its_samples_waited_for_at_once(scorer: Make) -> None:
    together = threading.Barrier(8)

    def judge(completion: str) -> float:
        together.wait()  # breaks unless all eight calls are under way
        return 1.0

    assert [score.total for score in await scorer(judge, timeout=20).score([GOOD] * 8)] == [1.0] * 8


class Computing:
    """A reward that computes on a bad completion until the test lets it go."""

    def __init__(self) -> None:
        self.begun = 0
        self.let_go = False

    def __call__(self, completion: str) -> float:
        self.begun += completion == "bad"
        while completion == "bad" and not self.let_go:
            pass
        return 1.0


@pytest.fixture
def computing() -> Iterator[Computing]:
    made = Computing()
    yield made
    made.let_go = True


async def test_a_reward_that_computes_gets_few_threads_and_others_pass_it(
    scorer: Make, computing: Computing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More threads would only make everybody wait longer for the interpreter's lock."""
    monkeypatch.setattr(workers, "STUCK", 1000.0)
    called = 0

    def other(completions: list[str]) -> list[float]:
        nonlocal called
        called += 1
        return [1.0] * len(completions)

    made = scorer(computing, other)
    stuck = [asyncio.create_task(made.score([BAD] * 8)) for _ in range(20)]
    while called < 20:  # noqa: ASYNC110  counted on a thread
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)  # time for as many threads as would come
    assert computing.begun <= workers.MOST_COMPUTING + 1
    computing.let_go = True
    assert {score.total for scores in await asyncio.gather(*stuck) for score in scores} == {2.0}


async def test_a_reward_that_computes_without_end_does_not_hold_up_its_other_calls(
    scorer: Make, computing: Computing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "STUCK", 0.1)
    made = scorer(computing)
    stuck = asyncio.create_task(made.score([BAD] * 8))
    while not computing.begun:  # noqa: ASYNC110  counted on a thread
        await asyncio.sleep(0.01)
    assert [score.total for score in await made.score([GOOD] * 4)] == [1.0] * 4
    assert not stuck.done()
    computing.let_go = True
    assert [score.total for score in await stuck] == [1.0] * 8


async def test_cheap_calls_stay_on_one_thread(scorer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "SLOW", 1000.0)  # none is, however busy the machine
    threads: set[int] = set()

    def where(completion: str) -> float:
        threads.add(threading.get_ident())
        return 1.0

    made = scorer(where)
    await asyncio.gather(*(made.score([GOOD] * 8) for _ in range(50)))
    assert len(threads) == 1
    assert threading.get_ident() not in threads


async def test_a_cancelled_score_begins_no_more_calls(scorer: Make, waiting: Waiting) -> None:
    called: list[str] = []

    def counts(completion: str) -> float:
        called.append(completion)
        return waiting.hangs(completion)

    made = scorer(counts)
    stuck = asyncio.create_task(made.score([BAD, *[GOOD] * 100]))
    await asyncio.to_thread(waiting.begun.acquire)
    stuck.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stuck
    before = len(called)
    waiting.let_go.set()
    assert (await made.score([Sample("last")]))[0].total == 1.0
    assert called[before:] == ["last"]


async def test_a_closed_scorer_leaves_no_thread_behind() -> None:
    before = set(threading.enumerate())
    async with Scorer(
        [WeightedReward(create_reward(fine), 1.0), WeightedReward(create_reward(fine_async), 1.0)], has_answer=True
    ) as made:
        await made.score(GROUP)
        ours = [thread for thread in threading.enumerate() if thread not in before]
    for thread in ours:
        thread.join(10)
    assert ours
    assert not any(thread.is_alive() for thread in ours)
    with pytest.raises(RewardError, match="the scorer is closed"):
        await made.score(GROUP)


HANGS_AT_EXIT = """
import asyncio, time
from gristmill_env.rewards import Sample, Scorer, WeightedReward, create_reward
def hangs(completion): time.sleep(1000)
async def blocks(completion): time.sleep(1000)
async def main():
    rewards = [WeightedReward(create_reward(function), 1.0) for function in (hangs, blocks)]
    async with Scorer(rewards, has_answer=True, timeout=0.1) as scorer:
        print((await scorer.score([Sample("")]))[0].failed)
asyncio.run(main())
"""


def test_a_process_ends_although_a_reward_hangs() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS_AT_EXIT], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "'hangs': 'it took longer" in done.stdout
    assert "'blocks': 'it blocked its event loop" in done.stdout
