"""The examples of docs/environments.md run as they are written. gateway/test_guide.py runs its agents."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.support.grids import rest_is_long
from tests.unit.env.environments.conftest import Roll
from tests.unit.env.gateway.conftest import ScriptedModel

from gristmill_env.environments import create_environment

pytestmark = pytest.mark.slow

GUIDE = Path(__file__).parents[4] / "docs" / "environments.md"
TEXT = re.sub(r"\n## Agents\n.*?(?=\n## )", "", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def call(tool: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


PLAYED: dict[str, tuple[list[str], float | None, int]] = {
    "TwoTries": (["5", "It is 4."], 0.5, 1),
    "BestOfThree": (["plan", "3", "4", "5", "4 is right."], 1.0, 4),
    "Echo": (["one", "two"], 1.0, 1),
    "search": ([call("search", query="four", most=1), "4"], None, 1),
    "WordGame": ([call("guess", word="5"), call("guess", word="4"), "It is 4."], 0.5, 1),
}
"""The model's replies in each example, the rollout's reward, and its branches."""


def example(name: str) -> str:
    """Returns the example that defines `name`."""
    found: str
    (found,) = [code for code in EXAMPLES if re.search(rf"^(class|def) {name}\b", code, re.MULTILINE)]
    return found


@pytest.mark.parametrize("name", rest_is_long(*PLAYED, first=2))
async def test_example_runs(roll: Roll, model: ScriptedModel, tmp_path: Path, name: str) -> None:
    says, reward, branches = PLAYED[name]
    words = tmp_path / "words"
    words.write_text("four\n")
    (tmp_path / "example.py").write_text(example(name).replace("/usr/share/dict/words", str(words)))
    params = {"tools": ["example.py:search"]} if name == "search" else {}
    kind = "tools" if name == "search" else f"example.py:{name}"
    model.says = list(says)
    rollout = await roll(create_environment(kind, params, tmp_path), tools=True, columns={"answer": "4"})
    assert (rollout.reward, len(rollout.branches), rollout.replies) == (reward, branches, len(says))
    assert model.says == []


def test_every_example_is_played() -> None:
    assert len(EXAMPLES) == len(PLAYED)
