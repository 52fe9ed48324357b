"""How many threads and waits rewards get, and that they are returned."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from tests.support.errors import raises
from tests.unit.env.rewards.running.misbehaving import BAD, GOOD, GROUP, Make, Waiting, fine, fine_async

from gristmill_env.errors import RewardError
from gristmill_env.rewards import Sample, Scorer, WeightedReward, create_reward
from gristmill_env.running import threads as call_threads

pytestmark = pytest.mark.slow


async def test_calls_of_a_waiting_reward_run_at_the_same_time(scorer: Make) -> None:
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


async def test_computing_reward_gets_few_threads_and_does_not_delay_others(
    scorer: Make, computing: Computing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More threads would only make all of them wait longer for the interpreter's lock."""
    monkeypatch.setattr(call_threads, "STUCK", 1000.0)
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
    assert computing.begun <= call_threads.MOST_COMPUTING + 1
    computing.let_go = True
    assert {score.total for scores in await asyncio.gather(*stuck) for score in scores} == {2.0}


async def test_endless_call_does_not_delay_the_other_calls_of_its_reward(
    scorer: Make, computing: Computing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_threads, "STUCK", 0.1)
    made = scorer(computing)
    stuck = asyncio.create_task(made.score([BAD] * 8))
    while not computing.begun:  # noqa: ASYNC110  counted on a thread
        await asyncio.sleep(0.01)
    assert [score.total for score in await made.score([GOOD] * 4)] == [1.0] * 4
    assert not stuck.done()
    computing.let_go = True
    assert [score.total for score in await stuck] == [1.0] * 8


async def test_cheap_calls_stay_on_one_thread(scorer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_threads, "SLOW", 1000.0)  # none is, however busy the machine
    threads: set[int] = set()

    def where(completion: str) -> float:
        threads.add(threading.get_ident())
        return 1.0

    made = scorer(where)
    await asyncio.gather(*(made.score([GOOD] * 8) for _ in range(50)))
    assert len(threads) == 1
    assert threading.get_ident() not in threads


async def test_cancelled_score_starts_no_further_calls(scorer: Make, waiting: Waiting) -> None:
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
    with raises(RewardError, "runner_closed"):
        await made.score(GROUP)
