"""The pool of killable processes: limits in processor time, the cost of a bad job, and leftovers."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.errors import raises

from gristmill_env.running.processes import JobError, ProcessPool, ProcessSpec

pytestmark = pytest.mark.slow

Make = Callable[..., ProcessPool]


@pytest.fixture
def pool() -> Iterator[Make]:
    """Makes pools of one process that do the jobs of jobs.py."""
    made: list[ProcessPool] = []

    def make(size: int = 1, **spec: Any) -> ProcessPool:
        fields = {"target": "tests.unit.env.running.jobs:worker", "settings": b"tests"}
        limits = {"cpu": 60.0, "wall": 600.0}
        made.append(ProcessPool(ProcessSpec(**{**fields, **limits, **spec}), size, "tests"))
        return made[-1]

    yield make
    for one in made:
        one.close()


async def test_pool_runs_jobs_in_separate_processes(pool: Make) -> None:
    made = pool(2)
    assert made.pids == []
    results = await asyncio.gather(*(made.do(f"echo:{n}".encode(), "a job") for n in range(20)))
    assert results == [f"tests echo:{n}".encode() for n in range(20)]
    assert os.getpid() not in made.pids
    assert len(made.pids) == 2


async def test_pool_kills_a_job_stuck_in_c_code_and_keeps_other_jobs(pool: Make) -> None:
    made = pool(cpu=1.0)
    stuck = asyncio.create_task(made.do(b"stick in C:", "the job"))
    waiting = [asyncio.create_task(made.do(f"echo:{n}".encode(), "a job")) for n in range(5)]
    with raises(JobError, "job_overran", job="the job", limit="cpu", seconds=1.0):
        await stuck
    assert await asyncio.gather(*waiting) == [f"tests echo:{n}".encode() for n in range(5)]


async def test_pool_kills_a_waiting_job_at_the_wall_clock_limit(pool: Make) -> None:
    made = pool(cpu=60.0, wall=1.0)
    with raises(JobError, "job_overran", job="the job", limit="wall", seconds=1.0):
        await made.do(b"sleep:600", "the job")
    assert await pool(cpu=0.1, wall=600.0).do(b"sleep:1", "the job") == b"tests sleep:1"


async def test_pool_limit_does_not_count_time_without_the_processor(pool: Make) -> None:
    made = pool(cpu=2.0)
    job = asyncio.create_task(made.do(b"compute:1", "the job"))
    for _ in range(6000):
        if made.pids:
            break
        await asyncio.sleep(0.01)
    (pid,) = made.pids
    os.kill(pid, signal.SIGSTOP)  # Other processes have the processor.
    await asyncio.sleep(2.5)
    os.kill(pid, signal.SIGCONT)
    assert await job == b"tests compute:1"


async def test_processor_time_of_earlier_jobs_does_not_count(pool: Make) -> None:
    made = pool(cpu=1.0)
    for n in range(4):
        assert await made.do(f"compute:0.{4 + n}".encode(), "the job")
    assert len(made.pids) == 1


@pytest.mark.parametrize(
    ("job", "code", "values"),
    [
        (b"raise:", "job_failed", {"error": "KeyError"}),
        (b"refuse:", "picture_missing", {"path": "/a/b", "sizes": [1, 2], "of": {"1": None}}),
        (b"exit:3", "job_died", {"job": "the job", "returncode": 3}),
    ],
)
async def test_error_of_a_failed_job_keeps_code_and_values(
    pool: Make, job: bytes, code: str, values: dict[str, Any]
) -> None:
    made = pool()
    with raises(JobError, code, **values):
        await made.do(job, "the job")
    assert await made.do(b"echo:", "a job") == b"tests echo:"


async def test_pool_reports_why_a_process_cannot_work(pool: Make) -> None:
    with raises(JobError, "process_broken", error="ValueError"):
        await pool(settings=b"broken").do(b"echo:", "the job")
    with raises(JobError, "picture_missing", path="/a/b"):
        await pool(settings=b"refused").do(b"echo:", "the job")
    with raises(JobError, "process_broken", error="ModuleNotFoundError") as raised:
        await pool(target="nothing_of_that_name:worker").do(b"echo:", "the job")
    assert "'nothing_of_that_name'" in str(raised.value)


async def test_pool_separates_printed_output_from_results(pool: Make) -> None:
    made = pool()
    assert await made.do(b"print:hello", "the job") == b"tests print:hello"
    assert await made.do(b"echo:", "the job") == b"tests echo:"


async def test_pool_jobs_may_use_signals(pool: Make) -> None:
    assert await pool().do(b"alarm:", "the job") == b"tests alarm:"


async def test_pool_kills_the_child_processes_of_a_killed_job(pool: Make, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with raises(JobError, "job_overran"):
        await pool(wall=3.0).do(f"child:{file}".encode(), "the job")
    child = int(file.read_text())
    async with asyncio.timeout(30):
        while _runs(child):  # noqa: ASYNC110  another process
            await asyncio.sleep(0.05)


async def test_pool_sends_a_large_job_completely(pool: Make) -> None:
    body = b"echo:" + b"x" * (5 << 20)
    assert await pool().do(body, "the job") == b"tests " + body


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
