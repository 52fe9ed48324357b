"""The pool of symbolic checks: its results, and the cost of a failed check."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from tests.support.errors import raises
from tests.support.grids import rest_is_long

from gristmill_env.answers.symbolic_pool import Check, SymbolicPool, Verdict
from gristmill_env.running.limiter import Limits
from gristmill_env.running.processes import JobError

pytestmark = pytest.mark.slow

GOOD = (r"3\sqrt{2}", r"\sqrt{18}")
BOMB = ("72", "9^{9^{9^{9}}}")
_VARIABLES = "&".join(f"x_{{{n}}}" for n in range(60))
BOMBS = {
    "factorial": "99999999!",
    "plain powers": "9**9**9**9",
    "tower of powers": BOMB[1],
    "nested braces": "{" * 3000 + "1" + "}" * 3000,
    "huge matrix": r"\det\begin{pmatrix}" + r"\\".join([_VARIABLES] * 60) + r"\end{pmatrix}",
}


@pytest.fixture(scope="module")
def pool() -> Iterator[SymbolicPool]:
    made = SymbolicPool(limits=Limits(2.0, 600.0))
    yield made
    made.close()


@pytest.fixture
def single() -> Iterator[SymbolicPool]:
    """One process, for tests that kill it."""
    made = SymbolicPool(size=1, limits=Limits(1.0, 600.0))
    yield made
    made.close()


@pytest.mark.long
async def test_memory_of_the_parent_does_not_count_for_its_checkers(single: SymbolicPool) -> None:
    ballast = bytearray(os.urandom(1 << 20) * 700)
    await single.check([GOOD])
    (pid,) = single.pids
    await single.check([("2", "1+1")])
    assert single.pids == [pid], "the process was replaced after its check"
    del ballast


async def test_symbolic_pool_starts_no_process_before_the_first_check(single: SymbolicPool) -> None:
    assert single.pids == []
    assert await single.check([GOOD]) is Verdict.SAME
    assert len(single.pids) == 1


@pytest.mark.parametrize(
    ("gold", "stated", "outcome"),
    [
        (*GOOD, Verdict.SAME),
        (r"3\sqrt{2}", r"\sqrt{17}", Verdict.DIFFERENT),
        ("1 < x < 2", "(1,2)", Verdict.SAME),
        ("(1,2)", "1 < x < 2", Verdict.DIFFERENT),  # not symmetric: the gold must come first
        (r"\dfrac{9}{7}", "9/7", Verdict.SAME),  # without its box this gold parses to nothing
        ("72", r"\frac{", Verdict.DIFFERENT),
        (r"\frac{", "72", Verdict.UNREADABLE_GOLD),
    ],
)
async def test_symbolic_check_takes_the_gold_first_and_reads_it_in_a_box(
    gold: str, stated: str, outcome: Verdict, pool: SymbolicPool
) -> None:
    assert await pool.check([(gold, stated)]) is outcome


async def test_symbolic_check_is_the_same_only_if_all_pairs_are_the_same(pool: SymbolicPool) -> None:
    assert await pool.check([GOOD, ("2", "1+1")]) is Verdict.SAME
    assert await pool.check([GOOD, ("2", "1+2")]) is Verdict.DIFFERENT
    assert await pool.check([GOOD, (r"\frac{", "2")]) is Verdict.UNREADABLE_GOLD


async def test_answers_never_mix_between_checks(pool: SymbolicPool) -> None:
    async def same(n: int, m: int) -> bool:
        return await pool.check([(rf"{n}\sqrt{{2}}", rf"\sqrt{{{2 * m * m}}}")]) is Verdict.SAME

    pairs = [(n, m) for n in range(1, 13) for m in range(1, 13)]
    assert await asyncio.gather(*(same(n, m) for n, m in pairs)) == [n == m for n, m in pairs]


@pytest.mark.long
async def test_symbolic_pool_fails_only_the_checks_of_bombs(pool: SymbolicPool) -> None:
    async def outcome(gold: str, stated: str) -> Verdict | JobError:
        try:
            return await pool.check([(gold, stated)])
        except JobError as error:
            return error

    good = [(rf"{n}\sqrt{{2}}", rf"\sqrt{{{2 * n * n}}}") for n in range(1, 26)]
    asked = [pair for n, bomb in enumerate(BOMBS.values()) for pair in (("72", bomb), *good[5 * n : 5 * n + 5])]
    found = await asyncio.gather(*(outcome(*pair) for pair in asked))
    bombed = [ends for pair, ends in zip(asked, found, strict=True) if pair not in good]
    assert [ends for pair, ends in zip(asked, found, strict=True) if pair in good] == [Verdict.SAME] * 25
    assert all(ends is Verdict.DIFFERENT or isinstance(ends, JobError) for ends in bombed)
    assert any(isinstance(ends, JobError) and ends.code == "job_overran" for ends in bombed)


async def test_a_check_past_its_deadline_is_an_error_and_its_process_is_replaced(single: SymbolicPool) -> None:
    await single.check([GOOD])
    before = single.pids
    queued = [asyncio.create_task(single.check([pair])) for pair in (BOMB, GOOD, ("2", "1+1"))]
    with raises(JobError, "job_overran", job=f"the check of {BOMB[1]!r}", limit="cpu", seconds=1.0):
        await queued[0]
    assert await asyncio.gather(*queued[1:]) == [Verdict.SAME, Verdict.SAME]
    assert single.pids != before
    assert len(single.pids) == 1
    assert not _runs(before[0])
    again = single.submit(*job(BOMB))
    assert again.done()  # a group of like completions does not stop the pool sixteen times
    with raises(JobError, "job_overran_before", job=f"the check of {BOMB[1]!r}"):
        again.result()


async def test_symbolic_pool_fails_only_the_check_of_a_dead_process() -> None:
    pool = SymbolicPool(size=1, limits=Limits(60.0, 600.0))
    try:
        await pool.check([GOOD])
        (pid,) = pool.pids
        bombed, queued = asyncio.create_task(pool.check([BOMB])), asyncio.create_task(pool.check([GOOD]))
        await _until(_busy(pid))
        os.kill(pid, signal.SIGKILL)
        with raises(JobError, "job_died", returncode=-signal.SIGKILL):
            await bombed
        assert await queued is Verdict.SAME
    finally:
        pool.close()


@pytest.mark.long
async def test_symbolic_pool_survives_a_process_death_between_checks(single: SymbolicPool) -> None:
    await single.check([GOOD])
    os.kill(single.pids[0], signal.SIGKILL)
    await _until(lambda: single.pids == [])
    assert await single.check([GOOD]) is Verdict.SAME


@pytest.mark.long
async def test_cancelled_check_does_not_affect_other_checks(single: SymbolicPool) -> None:
    bombed = asyncio.create_task(single.check([BOMB]))
    dropped, kept = asyncio.create_task(single.check([("1", "x")])), asyncio.create_task(single.check([GOOD]))
    await asyncio.sleep(0)
    dropped.cancel()
    with raises(JobError, "job_overran"):
        await bombed
    assert await kept is Verdict.SAME
    with pytest.raises(asyncio.CancelledError):
        await dropped


def test_symbolic_pool_answers_any_thread_and_event_loop(pool: SymbolicPool) -> None:
    found: list[Verdict] = []

    def ask() -> None:
        found.append(asyncio.run(pool.check([GOOD])))
        found.append(Verdict(pool.submit(*job(GOOD)).result().decode()))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [Verdict.SAME] * 8


@pytest.mark.long
async def test_closed_symbolic_pool_raises_an_error() -> None:
    pool = SymbolicPool(size=1, limits=Limits(60.0, 600.0))
    await pool.check([GOOD])
    (pid,) = pool.pids
    running, waiting = pool.submit(*job(BOMB)), pool.submit(*job(GOOD))
    await _until(_busy(pid))
    pool.close()
    assert not _runs(pid)
    with raises(JobError, "job_died"):
        running.result()
    with raises(JobError, "pool_closed"):
        waiting.result()
    with raises(JobError, "pool_closed"):
        await pool.check([GOOD])


async def test_checker_process_has_low_priority_and_ignores_ctrl_c(single: SymbolicPool) -> None:
    await single.check([GOOD])
    (pid,) = single.pids
    assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, 0)
    os.kill(pid, signal.SIGINT)
    assert await single.check([("3", "1+2")]) is Verdict.SAME
    assert single.pids == [pid]


@pytest.mark.parametrize("busy", rest_is_long(True, False))
def test_no_checker_outlives_a_killed_parent(busy: bool) -> None:
    script = f"""
        import time
        from gristmill_env.running.limiter import Limits
        from gristmill_env.answers.symbolic_pool import SymbolicPool

        pool = SymbolicPool(size=1, limits=Limits(4.0, 600.0))
        pool.submit(*{job(GOOD)!r}).result()
        if {busy}:
            pool.submit(*{job(BOMB)!r})
        print(*pool.pids, flush=True)
        time.sleep(600)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert _runs(pid)
    if busy:
        _wait(_busy(pid))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _wait(lambda: not _runs(pid))


def job(pair: tuple[str, str]) -> tuple[bytes, str]:
    """Returns the arguments of `submit` for the check of a pair, for callers without an event loop."""
    check = Check((pair,), 0.0)
    return msgspec.msgpack.encode(check), check.shown


def _runs(pid: int) -> bool:
    """Returns whether the process exists and is not a zombie."""
    try:
        return _stat(pid)[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _busy(pid: int) -> Callable[[], bool]:
    """Returns a check whether the process computes for a while from now on. Then it is at a bomb, not at the end of an
    earlier check."""
    started = _cpu_seconds(pid)
    return lambda: _cpu_seconds(pid) - started > 0.3


def _cpu_seconds(pid: int) -> float:
    return (int(_stat(pid)[11]) + int(_stat(pid)[12])) / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str]:
    """Returns the fields of proc(5)'s stat, from the state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


async def _until(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(_wait, condition)


def _wait(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)
