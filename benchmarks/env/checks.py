#!/usr/bin/env python3
"""The accuracy reward: checks per second, and the effect of a bomb on the calling event loop.

Rates are of `await accuracy(...)` on one event loop, with 256 completions at a time and a pool of two processes. Caches
are warm with other answers. "exact" completions need no algebra, and "algebra" completions need it. "mixture" has both:
half GSM8K-like problems and half MATH-like problems (see `answers`).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.env.answers import Case, gsm8k_like, math_like
from benchmarks.machine import cpu_seconds

from gristmill_env.answers.comparison import compare, read_answer
from gristmill_env.answers.extraction import final_answer, gold_answer
from gristmill_env.answers.symbolic_pool import symbolic_pool
from gristmill_env.rewards.accuracy import accuracy
from gristmill_env.running.processes import JobError

WANTED_PER_S = 1000
WANTED_LAG_MS = 20
_AT_A_TIME = 256
_TICK_S = 0.001
BOMBS = {
    "a tower of powers": r"\boxed{9^{9^{9^{9}}}}",
    "a long sum": r"\boxed{\sum_{i=1}^{10^{12}} \frac{1}{i^3}}",
    "a factorial": r"\boxed{99999999!}",
    "3000 nested braces": r"\boxed{" + "{" * 3000 + "1" + "}" * 3000 + "}",
    "a huge matrix": r"\boxed{\det\begin{pmatrix}" + r"\\".join([r"&".join("xyz" * 8)] * 18) + r"\end{pmatrix}}",
}


@dataclass(frozen=True)
class Rate:
    """The speed at which completions were checked."""

    what: str
    checks: int
    by_algebra: int
    """Number of the checks that reached the pool."""
    seconds: float
    cpu_s: float
    """Processor seconds of this process and the pool's processes. They distinguish a slow machine from a busy one."""
    wrong: int
    """Number of checks with a wrong result. Any number except 0 is a defect."""

    @property
    def per_s(self) -> float:
        return self.checks / self.seconds


@dataclass(frozen=True)
class Lag:
    """Lateness of a 1 ms timer, in ms, on an event loop with one bomb and 16 good checks running."""

    bomb: str
    ends: str
    """The outcome of the bomb's check."""
    seconds: float
    good: int
    """Number of good checks that ended meanwhile, all with the right result."""
    p50: float
    p99: float
    most: float


@dataclass(frozen=True)
class Checks:
    """All measurements."""

    rates: Sequence[Rate]
    lags: Sequence[Lag]
    alike_by_algebra: int
    """Number of answers in the row's notation that reached the pool."""


async def measure(problems: int = 500, seed: int = 7) -> Checks:
    """Measures with `problems` GSM8K-like and MATH-like problems each, and eight completions per problem.

    Each rate uses different problems.
    """

    def both(more: int) -> list[Case]:
        pairs = zip(gsm8k_like(problems, seed + more), math_like(problems, seed + more), strict=True)
        return [case for pair in pairs for case in pair]

    await _score("warm-up", math_like(100, seed))
    rates = [
        await _score("GSM8K-like", gsm8k_like(problems, seed + 1)),
        await _score("MATH-like", math_like(problems, seed + 1)),
        await _score("exact", [case for case in both(2) if not _needs_algebra(case)]),
        await _score("algebra", [case for case in math_like(4 * problems, seed + 3) if _needs_algebra(case)]),
        await _score("mixture", both(4)),
    ]
    alike = await _score("alike", [case for case in both(5) if case.alike])
    lags = [await _lag(name, bomb) for name, bomb in BOMBS.items()]
    return Checks(rates, lags, alike.by_algebra)


def page(found: Checks) -> Iterator[str]:
    """Yields the results as lines of Markdown."""
    yield "| checks | number | by algebra | checks/s | CPU ms a check | wrong |"
    yield "|---|---|---|---|---|---|"
    for rate in found.rates:
        share = f"{rate.by_algebra / rate.checks:.0%}"
        cpu_ms = 1000 * rate.cpu_s / rate.checks
        yield f"| {rate.what} | {rate.checks:,} | {share} | {rate.per_s:,.0f} | {cpu_ms:.2f} | {rate.wrong} |"
    yield ""
    yield f"Answers in the row's notation that reached algebra: {found.alike_by_algebra}"
    yield ""
    yield "| bomb | its check | s | good checks meanwhile | lag p50 ms | p99 ms | max ms |"
    yield "|---|---|---|---|---|---|---|"
    for lag in found.lags:
        yield (
            f"| {lag.bomb} | {lag.ends} | {lag.seconds:.1f} | {lag.good:,} "
            f"| {lag.p50:.2f} | {lag.p99:.2f} | {lag.most:.2f} |"
        )
    mixture = next(rate for rate in found.rates if rate.what == "mixture")
    worst = max(lag.p99 for lag in found.lags)
    yield ""
    yield f"mixture: {mixture.per_s:,.0f} checks/s (wanted ≥ {WANTED_PER_S}); "
    yield f"worst lag p99: {worst:.2f} ms (wanted < {WANTED_LAG_MS})"


def _needs_algebra(case: Case) -> bool:
    stated = final_answer(case.completion)
    if stated is None:
        return False
    return not isinstance(compare(read_answer(gold_answer(case.answer)), read_answer(stated)), bool)


async def _score(what: str, cases: Sequence[Case]) -> Rate:
    pool, places = symbolic_pool(), asyncio.Semaphore(_AT_A_TIME)
    asked, cpu_s = pool.asked, cpu_seconds(os.getpid(), *pool.pids)

    async def right(case: Case) -> bool:
        async with places:
            return await accuracy(case.completion, case.answer) == float(case.right)

    started = time.perf_counter()
    ends = await asyncio.gather(*(right(case) for case in cases))
    seconds = time.perf_counter() - started
    cpu_s = cpu_seconds(os.getpid(), *pool.pids) - cpu_s
    return Rate(what, len(cases), pool.asked - asked, seconds, cpu_s, wrong=len(ends) - sum(ends))


async def _lag(name: str, bomb: str) -> Lag:
    lags: list[float] = []
    started = time.perf_counter()
    bombed = asyncio.create_task(_ends(bomb))
    good = [asyncio.create_task(_good_until(bombed, lane)) for lane in range(16)]
    while not bombed.done() or len(lags) < 500:  # some bombs end at once
        asleep = time.perf_counter()
        await asyncio.sleep(_TICK_S)
        lags.append((time.perf_counter() - asleep - _TICK_S) * 1000)
    checked = sum(await asyncio.gather(*good))
    cuts = statistics.quantiles(lags, n=100)
    return Lag(name, await bombed, time.perf_counter() - started, checked, cuts[49], cuts[98], max(lags))


async def _ends(bomb: str) -> str:
    try:
        return f"scored {await accuracy(bomb, '72')}"
    except JobError as error:
        return error.code


async def _good_until(bombed: asyncio.Task[str], lane: int) -> int:
    checked = 0
    while not bombed.done() or not checked:
        checked += 1
        one = 1000 * lane + checked + 1
        completion, gold = rf"\boxed{{\sqrt{{2}}+{one}}}", rf"{one}+\sqrt{{2}}"  # for algebra
        if await accuracy(completion, gold) != 1.0:
            raise AssertionError(f"{completion} is {gold}")
    return checked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=500, help="number of problems of each kind for each rate")
    options = parser.parse_args()
    print("\n".join(page(asyncio.run(measure(options.problems)))))


if __name__ == "__main__":
    main()
