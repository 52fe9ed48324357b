"""The programs of docs/environments.md, "Agents", play a rollout each, as they are written there."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.grids import rest_is_long
from tests.support.ports import free_port
from tests.unit.env.gateway.conftest import SAMPLING, Running, ScriptedModel

from gristmill_env.agents.player import agents
from gristmill_env.data import Item
from gristmill_env.rollouts.conversations import GroupPrompts
from gristmill_env.rollouts.turns import Ask
from gristmill_env.settings.task import AgentSpec

pytestmark = pytest.mark.slow

GUIDE = Path(__file__).parents[4] / "docs" / "environments.md"
SECTION = GUIDE.read_text().partition("\n## Agents\n")[2].partition("\n## ")[0]
PROGRAMS = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
ITEM = Item(row=3, index=3, prompt="2 + 2?", answer="4")


def test_programs_are_short() -> None:
    assert [len(program.splitlines()) <= 25 for program in PROGRAMS] == [True] * 3


@contextlib.contextmanager
def started(path: Path) -> Iterator[None]:
    """Runs a program that works elsewhere."""
    with subprocess.Popen([sys.executable, str(path)]) as process:
        try:
            yield
        finally:
            process.terminate()


@pytest.mark.parametrize("kind", rest_is_long("function", "elsewhere", "command", first=2))
async def test_program_of_the_guide_plays_a_rollout(
    running: Running, model: ScriptedModel, tmp_path: Path, kind: str
) -> None:
    path, address = tmp_path / "agent.py", f"127.0.0.1:{free_port()}"
    specs = {
        "function": AgentSpec(function="agent.py:run"),
        "command": AgentSpec(command=[sys.executable, "agent.py"]),
        "elsewhere": AgentSpec(external=True, address=address),
    }
    path.write_text(PROGRAMS[list(specs).index(kind)].replace("127.0.0.1:9100", address))
    if kind == "command":
        model.says = ['<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call>']
    ask = Ask(GroupPrompts(running.policy.prompts), SAMPLING, evaluation=False)
    async with agents(specs[kind], running.policy, tmp_path, tmp_path / "agent.log", {}) as player:
        with started(path) if kind == "elsewhere" else contextlib.nullcontext():
            rollout = await player.play(ITEM, ask)
    assert (rollout.reward, rollout.text) == (1.0, "4")
    if kind == "command":
        assert [message["content"] for message in rollout.messages[-2:]] == ["4", "4"], "the tool's result, the reply"
