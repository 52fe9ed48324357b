"""Rollouts by the real package verifiers. test_verifiers.py runs this file in `.venv-verifiers`."""

# mypy: disable-error-code="misc, untyped-decorator, import-not-found"
from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
import verifiers.v1 as vf
from mcp.server.mcpserver import MCPServer
from tests.support.errors import raises
from tests.support.ports import free_port
from tests.unit.env.gateway.conftest import Running, ScriptedModel, until
from tests.unit.env.gateway.test_player import ask

from gristmill_env.adapters import verifiers
from gristmill_env.agents.player import AgentPlayer
from gristmill_env.agents.runners import FunctionAgent
from gristmill_env.data.dataset import PromptDataset
from gristmill_env.errors import DatasetError, EpisodeError, InferenceError
from gristmill_env.rollouts.groups import Rollout
from gristmill_env.settings.run import EnvConfig

HERE = Path(__file__).parent
Play = Callable[..., Awaitable[Rollout]]

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def tasksets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))


def configured(**params: Any) -> EnvConfig:
    """Returns the configuration of a run with the environment `verifiers`."""
    given = {"taskset": "verifiers_sums", **params}
    return EnvConfig.model_validate({"environment": {"type": "verifiers", "params": given, "step_timeout": 120}})


@contextlib.asynccontextmanager
async def playing(running: Running, config: EnvConfig) -> AsyncIterator[Play]:
    """Gives a function that plays a row. The process of the agent imports verifiers once, in ten seconds."""
    spec, rows = config.agent, PromptDataset(config.dataset, None)
    assert spec is not None
    assert spec.function is not None
    async with FunctionAgent(spec.function, None, spec.params) as agent:

        async def play(index: int, **changed: Any) -> Rollout:
            policy = dataclasses.replace(running.policy, **changed)
            return await AgentPlayer(spec, agent, running.gateway, policy).play(rows.item_at(index), ask(running))

        yield play


def test_rows_are_the_tasks_of_the_taskset() -> None:
    config = configured()
    rows = PromptDataset(config.dataset, None)
    assert (len(rows), rows.item_at(2).prompt) == (6, "What is 2 + 2?")
    test = config.dataset.model_copy(update={"split": "test[:2]"})
    assert PromptDataset(test, None).item_at(1).prompt == "What is 101 + 101?"
    with raises(DatasetError, "rows_failed") as failed:
        PromptDataset(configured(taskset={"id": "verifiers_sums", "least": 3}).dataset, None)
    assert "least" in str(failed.value)


async def test_rollouts_of_a_taskset(running: Running, model: ScriptedModel) -> None:
    async with playing(running, configured()) as play:
        model.says = ["4"]
        rollout = await play(2)
        assert (rollout.reward, rollout.replies, rollout.text) == (1.0, 1, "4")
        assert sum(rollout.mask) == len("4") + 1, "the sampled tokens are trained, and only these"
        assert "<|im_start|>system\nBe exact.<|im_end|>\n<|im_start|>user\nWhat is 2 + 2?" in model.prompts[0]

        model.says = ["It is 4."]
        rollout = await play(2)
        assert (rollout.reward, rollout.parts) == (0.75, {"right": 0.75, "short": 0.0, "letters": 8.0})

        together = await asyncio.gather(*(play(2) for _ in range(20)))
        assert [one.reward for one in together] == [1.0] * 20
        assert [one.replies for one in together] == [1] * 20

        with raises(EpisodeError, "verifiers_failed") as failed:  # a failed trace
            await play(5)
        assert "the checker is away" in str(failed.value)
        assert failed.value.unfinished is not None

        with raises(EpisodeError, "agent_said_nothing"):  # a reply without room is not an error of the program
            await play(2, max_length=20)

        model.server.answers["/inference/v1/generate"] = lambda: (500, {"error": "no"})
        with pytest.raises(InferenceError):
            await play(2)


async def test_in_process_harness_calls_tools_over_mcp(running: Running, model: ScriptedModel) -> None:
    """Over the harness alone: verifiers builds the package of a task's tool server with uv."""
    verifiers._verifiers()
    tools = MCPServer("adder")

    @tools.tool()
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    calls = [{"name": "sums_add", "arguments": {"a": 2, "b": 2}}, {"name": "jump", "arguments": {}}]
    model.says = ["".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls), "4"]
    server = uvicorn.Server(uvicorn.Config(tools.streamable_http_app(), port=free_port(), log_level="error"))
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    harness = sys.modules["verifiers.v1.harnesses.gristmill_in_process"].InProcessHarness(vf.HarnessConfig())
    context, trace = SimpleNamespace(model="tiny"), SimpleNamespace(stop_condition=None)
    urls = {"sums": f"http://127.0.0.1:{server.config.port}/mcp"}
    given: Any = (context, trace, None, running.url, running.session.key, urls, vf.TaskData(prompt="2 + 2?"))
    result = await harness.launch(*given)
    server.should_exit = True
    await serving
    assert (result.exit_code, model.says) == (0, [])
    assert "Adds two numbers." in model.prompts[0]
    assert "tool\n4<|im_end|>" in model.prompts[1]
    assert "tool\nError: there is no tool jump; there are sums_add<|im_end|>" in model.prompts[1]


async def test_verifiers_own_harness_plays_the_same(running: Running, model: ScriptedModel) -> None:
    async with playing(running, configured(harness="null")) as play:
        model.says = ["4"]
        rollout = await play(2)
    assert (rollout.reward, rollout.replies) == (1.0, 1)
