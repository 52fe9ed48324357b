"""Agents as functions in a child process, as commands, and as programs elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from tests.support.errors import raises
from tests.unit.env.gateway.conftest import Running, until

from gristmill_env.agents import runners
from gristmill_env.agents.runners import CommandAgent, ExternalAgent, FunctionAgent, checked_result, checked_reward
from gristmill_env.agents.task import AgentTask, Endpoint
from gristmill_env.errors import EpisodeError
from gristmill_env.gateway import Session, Sessions, serving
from gristmill_env.outages import may_pass

pytestmark = pytest.mark.slow

TASK = AgentTask("2 + 2?", [{"role": "user", "content": "2 + 2?"}], "4", {"level": 3}, 7)
ENDPOINT = Endpoint("http://127.0.0.1:1/s/k/v1", "http://127.0.0.1:1/s/k", "k", "tiny")
AGENTS = """
import asyncio, os, sys, time
from pathlib import Path


async def good(task, endpoint):
    print("an agent's output is not a report")
    return 0.5 if (task.answer, task.row["level"], endpoint.key) == ("4", 3, "k") else 0.0

def plain(task, endpoint):
    return 1

async def silent(task, endpoint):
    return None

async def raises(task, endpoint):
    raise ValueError("no idea")

async def ends(task, endpoint):
    os._exit(3)

async def waits(task, endpoint):
    Path(task.prompt).touch()
    await asyncio.sleep(3600)

async def hangs(task, endpoint):
    Path(task.prompt).touch()
    time.sleep(3600)

async def dispatch(task, endpoint):
    return await globals()[task.index and "good" or "ends"](task, endpoint)

async def options(task, endpoint, *, level: int, more: bool = False):
    return level + more

async def untold(task, endpoint, *, client: "Client | None" = None):  # a type for checkers only
    return 1

async def scalar(task, endpoint):
    import numpy
    return numpy.float32(0.5)

not_a_function = 3
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.py").write_text(AGENTS)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "reward"), [("good", 0.5), ("plain", 1), ("silent", None), ("untold", 1), ("scalar", 0.5)]
)
async def test_function_returns_its_reward(folder: Path, name: str, reward: float | None) -> None:
    async with FunctionAgent(f"a.py:{name}", folder) as agent:
        found = await asyncio.gather(*(agent.result(TASK, ENDPOINT) for _ in range(20)))
    assert found == [reward] * 20


async def test_function_gets_its_params_checked(folder: Path) -> None:
    async with FunctionAgent("a.py:options", folder, {"level": "3", "more": True}) as agent:
        assert await agent.result(TASK, ENDPOINT) == 4
    async with FunctionAgent("a.py:options", folder, {"level": 10**30}):
        pass
    for params, code in (
        ({}, "parameter_missing"),
        ({"level": "x"}, "parameter_invalid"),
        ({"levl": 1}, "unknown_parameter"),
    ):
        with raises(EpisodeError, code):
            async with FunctionAgent("a.py:options", folder, params):
                pass


async def test_error_of_a_function_names_the_agent(folder: Path) -> None:
    async with FunctionAgent("a.py:raises", folder) as agent:
        with raises(EpisodeError, "agent_raised", agent="a.py:raises"):
            await agent.result(TASK, ENDPOINT)


@pytest.mark.parametrize(("name", "code"), [("gone", "plugin_attribute_missing"), ("not_a_function", "not_an_agent")])
async def test_agent_that_cannot_be_loaded_is_refused_at_the_start(folder: Path, name: str, code: str) -> None:
    with raises(EpisodeError, code):
        async with FunctionAgent(f"a.py:{name}", folder):
            pass


async def test_process_that_ends_fails_its_rollouts_and_is_replaced(folder: Path) -> None:
    async with FunctionAgent("a.py:dispatch", folder) as agent:
        with raises(EpisodeError, "agent_process_died"):
            await agent.result(AgentTask("", [], index=0), ENDPOINT)
        assert await agent.result(TASK, ENDPOINT) == 0.5


@pytest.mark.parametrize("name", ["waits", "hangs"])
async def test_cancelled_function_ends(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gristmill_env.running.code_process.GRACE", 60.0 if name == "waits" else 0.5)
    began = folder / "began"
    async with FunctionAgent(f"a.py:{name}", folder) as agent:
        running = asyncio.create_task(agent.result(AgentTask(str(began), []), ENDPOINT))
        await until(began.exists)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (agent._process.pid is not None) is (name == "waits"), "only a process that hangs is killed"


async def test_command_gets_addresses_and_task_and_writes_its_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GRISTMILL_API_TOKEN", "HF_TOKEN", "JUDGE_API_KEY", "DB_PASSWORD"):
        monkeypatch.setenv(name, "hidden")
    monkeypatch.setenv("STORE_URL", "redis://user:hidden@localhost:6379")
    monkeypatch.setenv("WANDB_API_KEY", "passed on")
    monkeypatch.setenv("DATA_FOLDER", "/data")
    code = (
        "import json, os\n"
        "task = json.load(open(os.environ['GRISTMILL_TASK']))\n"
        "print(json.dumps(dict(os.environ)))\n"
        "open(os.environ['GRISTMILL_REWARD'], 'w').write(str(len(task['prompt'])))\n"
    )
    log = tmp_path / "logs" / "agent.log"
    agent = CommandAgent([sys.executable, "-c", code], tmp_path, log, {"WANDB_API_KEY": os.environ["WANDB_API_KEY"]})
    assert await agent.result(TASK, ENDPOINT) == len(TASK.prompt)
    seen = json.loads(log.read_text())
    assert (seen["OPENAI_BASE_URL"], seen["OPENAI_API_KEY"]) == (ENDPOINT.base_url, "k")
    assert (seen["ANTHROPIC_BASE_URL"], seen["ANTHROPIC_API_KEY"]) == (ENDPOINT.anthropic_url, "k")
    assert (seen["DATA_FOLDER"], seen["WANDB_API_KEY"]) == ("/data", "passed on")
    assert "hidden" not in log.read_text()


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ([sys.executable, "-c", "raise SystemExit(3)"], "agent_failed"),
        (["/nowhere/agent"], "agent_not_started"),
        ([sys.executable, "-c", "import os; os.mkdir(os.environ['GRISTMILL_REWARD'])"], "agent_reward"),
        ([sys.executable, "-c", "import os; os.mkfifo(os.environ['GRISTMILL_REWARD'])"], "agent_reward"),
        ([sys.executable, "-c", "import os; os.symlink('reward', os.environ['GRISTMILL_REWARD'])"], "agent_reward"),
        (
            [sys.executable, "-c", "import os; open(os.environ['GRISTMILL_REWARD'], 'w').write('9' * 400)"],
            "agent_reward",
        ),
        ([sys.executable, "-c", "import os; open(os.environ['GRISTMILL_REWARD'], 'w').write('good')"], "agent_reward"),
    ],
)
async def test_command_that_fails_has_a_code(tmp_path: Path, command: list[str], code: str) -> None:
    with raises(EpisodeError, code):
        checked_result(await CommandAgent(command, tmp_path, tmp_path / "agent.log").result(TASK, ENDPOINT))


@pytest.mark.parametrize("target", ["tempfile.mkdtemp", "pathlib.Path.write_bytes"])
async def test_command_that_a_full_disk_does_not_start_may_start_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    monkeypatch.setattr(target, Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with raises(EpisodeError, "agent_not_started") as refused:
        await CommandAgent(["true"], tmp_path, tmp_path / "agent.log").result(TASK, ENDPOINT)
    assert may_pass(refused.value)


async def test_output_of_commands_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners, "_LARGEST_LOG", 10_000)
    monkeypatch.setattr(runners, "_CHECK_LOG", 0.02)
    log = tmp_path / "agent.log"
    # Writes until the file is emptied.
    code = (
        f"import os\nmost, path = 0, {str(log)!r}\n"
        "while os.stat(path).st_size >= most:\n"
        "    most = os.stat(path).st_size\n"
        "    print('x' * 1000, flush=True)\n"
    )
    await CommandAgent([sys.executable, "-c", code], tmp_path, log).result(TASK, ENDPOINT)


async def test_row_that_cannot_be_sent_is_an_error_of_its_rollout(running: Running, folder: Path) -> None:
    tasks = [AgentTask("2 + 2?", [], None, {"column": value}, 7) for value in (object(), 10**400)]
    command, elsewhere = CommandAgent(["true"], folder, folder / "agent.log"), ExternalAgent(Sessions())
    async with FunctionAgent("a.py:silent", folder) as function:
        for run in (
            function.result(tasks[0], ENDPOINT), function.result(tasks[1], ENDPOINT),
            command.result(tasks[0], ENDPOINT), elsewhere.run(tasks[0], ENDPOINT, running.session, 60),
        ):  # fmt: skip
            with raises(EpisodeError, "row_not_encodable", row=7):
                await run


async def test_cancelled_command_is_killed_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'])\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}\\n')\n"
        "time.sleep(3600)\n"
    )
    agent = CommandAgent([sys.executable, "-c", code], tmp_path, tmp_path / "agent.log")
    running = asyncio.create_task(agent.result(TASK, ENDPOINT))
    await until(lambda: pids.exists() and pids.read_text().endswith("\n"))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    for pid in map(int, pids.read_text().split()):
        await until(lambda pid=pid: not _runs(pid))  # type: ignore[misc]


def _runs(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    return False


async def test_program_elsewhere_asks_for_a_task_and_reports_a_reward(running: Running) -> None:
    agent = ExternalAgent(Sessions())
    async with (
        serving(Sessions(), "tiny", ("127.0.0.1", 0), {}, agent.routes) as gateway,
        httpx.AsyncClient(base_url=gateway.url) as program,
    ):
        session = running.session
        path = f"/s/{session.key}/reward"
        offered = Endpoint("", "", session.key, "tiny")
        working = asyncio.create_task(agent.run(TASK, offered, session, 60))
        given: dict[str, Any] = (await program.post("/agent/task")).json()
        assert given["task"]["prompt"] == TASK.prompt
        assert given["endpoint"]["base_url"] == f"{gateway.url}/s/{session.key}/v1", (
            "the address that the program knows"
        )
        for wrong in ({"reward": "much"}, {"reward": 10**400}, {"rewards": 1}):
            assert (await program.post(path, json=wrong)).status_code == 400
        assert (
            await program.post(path, json={"reward": 0.25, "parts": {"right": 1}, "metrics": [2]})
        ).status_code == 200
        await working
        assert session.ended is not None
        assert (session.ended.reward, session.ended.parts) == (0.25, {"right": 1.0})
        same, other = {"reward": 0.25, "parts": {"right": 1}}, {"reward": 0.5}
        assert [(await program.post(path, json=body)).status_code for body in (same, other)] == [200, 404]
        failing = asyncio.create_task(agent.run(TASK, offered, session, 60))
        await program.post("/agent/task")
        await program.post(path, json={"error": "no sandbox", "traceback": "...", "reward": "none"})
        with raises(EpisodeError, "agent_failed"):
            await failing


async def test_report_after_a_kill_is_repeated_until_the_rollout_goes_on(running: Running) -> None:
    sessions = running.gateway.sessions
    session, first, second = running.session, ExternalAgent(sessions), ExternalAgent(sessions)
    await session.begin()

    async def kill(killed: Session) -> None:
        await killed.close()  # as a kill does, this leaves the file
        sessions.remove(killed)

    async def report(agent: ExternalAgent, reward: float = 0.25) -> int:
        async with (
            serving(sessions, "tiny", ("127.0.0.1", 0), {}, agent.routes) as gateway,
            httpx.AsyncClient(base_url=gateway.url) as program,
        ):
            return (await program.post(f"/s/{session.key}/reward", json={"reward": reward})).status_code

    await kill(session)
    assert await report(first) == 503
    resumed = running.open(folder=running.folder)
    working = asyncio.create_task(first.run(TASK, ENDPOINT, resumed, 60))
    assert await report(first) == 200
    await working
    await kill(resumed)  # before the group is complete
    assert [await report(first), await report(first, 0.5)] == [200, 404]
    assert await report(second) == 503
    await second.run(TASK, ENDPOINT, running.open(folder=running.folder), 60)
    assert await report(second) == 200


async def test_task_and_report_that_the_disk_does_not_take_are_accepted_when_it_has_room(
    running: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    agent, session = ExternalAgent(Sessions()), running.session
    assert session._file is not None
    append, full = session._file.append, Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    async with (
        serving(Sessions(), "tiny", ("127.0.0.1", 0), {}, agent.routes) as gateway,
        httpx.AsyncClient(base_url=gateway.url) as program,
    ):
        working = asyncio.create_task(agent.run(TASK, Endpoint("", "", session.key, "tiny"), session, 60))
        for path, body in (("/agent/task", None), (f"/s/{session.key}/reward", {"reward": 0.25})):
            monkeypatch.setattr(session._file, "append", full)
            answers = [await program.post(path, json=body) for _ in range(2)]
            assert {(one.status_code, one.json()["error"]["code"]) for one in answers} == {(503, "session_not_written")}
            assert session.failure is not None
            monkeypatch.setattr(session._file, "append", append)
            assert (await program.post(path, json=body)).status_code == 200
            assert session.failure is None
        await working
    assert len([one for one in caplog.records if one.name == "gristmill_env.gateway.sessions"]) == 2, (
        "one line for each shortage"
    )


@pytest.mark.parametrize(("header", "status"), [("", 401), ("Bearer other", 401), ("Bearer word", 200)])
async def test_task_needs_the_token_if_there_is_one(running: Running, header: str, status: int) -> None:
    agent = ExternalAgent(Sessions(), "word")
    async with (
        serving(Sessions(), "tiny", ("127.0.0.1", 0), {}, agent.routes) as gateway,
        httpx.AsyncClient(base_url=gateway.url, headers={"Authorization": header}) as program,
    ):
        working = asyncio.create_task(
            agent.run(TASK, Endpoint("", "", running.session.key, "tiny"), running.session, 60)
        )
        answer = await program.post("/agent/task")
        assert answer.status_code == status
        assert status == 200 or answer.json()["error"]["code"] == "agent_token"
        working.cancel()


async def test_task_whose_time_is_over_is_not_given_away(running: Running) -> None:
    agent = ExternalAgent(Sessions())
    sessions = [running.open() for _ in range(2)]
    for session in sessions:
        working = asyncio.create_task(agent.run(TASK, Endpoint("", "", session.key, "tiny"), session, 60))
        await asyncio.sleep(0)
        if session is sessions[0]:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
    found = await agent.next_task(5)
    assert found is not None
    assert found.session is sessions[1]
    working.cancel()


async def test_time_of_a_program_begins_when_it_gets_the_task(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged = asyncio.Event()
    monkeypatch.setattr(runners, "_QUIET", 0.05)
    monkeypatch.setattr(runners.logger, "warning", lambda *_: logged.set())
    agent = ExternalAgent(Sessions())
    offered = Endpoint("", "", running.session.key, "tiny")
    working = asyncio.create_task(agent.run(TASK, offered, running.session, 0.01))
    await logged.wait()  # no program asks for the task, which costs no time of the rollout
    assert not working.done()
    async with (
        serving(Sessions(), "tiny", ("127.0.0.1", 0), {}, agent.routes) as gateway,
        httpx.AsyncClient(base_url=gateway.url) as program,
    ):
        assert (await program.post("/agent/task")).status_code == 200
        with pytest.raises(TimeoutError):
            await working


async def test_task_that_no_program_got_is_offered_again_after_a_kill(running: Running) -> None:
    for handed in (False, True):
        folder = running.folder.with_name(f"g0000001{int(handed)}")
        session = running.open(folder=folder)
        if handed:
            await session.begin()
        await session.close()
        assert running.open(folder=folder).resumed is handed


@pytest.mark.parametrize(
    "value", ["1", True, float("nan"), float("inf"), pytest.param(10**400, id="huge"), [], {"reward": 1}]
)
def test_reward_that_is_no_number_is_refused(value: Any) -> None:
    with raises(EpisodeError, "agent_reward"):
        checked_reward(value)


def test_result_has_a_reward_and_named_parts() -> None:
    assert checked_result({"reward": 1, "parts": {"right": 0.5, "unscored": None}}) == (1.0, {"right": 0.5})
    assert checked_result(0.5) == (0.5, {})
    assert checked_result(None) == (None, {})
    for wrong in (
        {"rewards": 1},
        {"reward": 1, "parts": [1]},
        {"reward": 1, "parts": {"right": "much"}},
        {"reward": "x"},
    ):
        with raises(EpisodeError, "agent_reward"):
            checked_result(wrong)
