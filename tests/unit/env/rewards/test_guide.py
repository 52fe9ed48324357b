"""docs/rewards.md lists the rewards as they are, and its examples have the documented results."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import configuration_docs
from gristmill.internal.settings import parse
from gristmill_env.rewards import create_reward, registry, reward_names
from gristmill_env.settings.dataset import DatasetConfig

PAGE = Path(__file__).parents[4] / "docs" / "rewards.md"


def blocks(language: str) -> list[str]:
    found: list[str] = re.findall(rf"^ *```{language}\n(.*?)^ *```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert found
    return found


def test_every_reward_has_a_row_with_its_options() -> None:
    table = configuration_docs.TABLES["rewards"]()
    shipped = [name for name in reward_names() if registry.find(name).target.__module__.startswith("gristmill_env.")]
    assert "| `length` | `target_tokens: 128`" in table
    assert "| `combined` | `rewards`, `normalization: none` | The weighted sum of other rewards. |" in table
    assert "| `tag_count` | `preferred_tags: [think, answer]` |" in table
    assert table.count("\n") == len(shipped) + 2
    assert table in PAGE.read_text()


def test_rewards_of_the_page_have_the_documented_results() -> None:
    code: dict[str, Any] = {}
    try:
        for block in blocks("python"):
            exec(block, code)
        ends_right = create_reward("last_word")
    finally:
        registry._REGISTRY.pop("last_word", None)
    assert ends_right.score(["it is Paris."], answer="Paris") == [1.0]
    assert {ends_right.extracted(text, {}) for text in ("it is Paris.", "paris")} == {"paris"}
    assert create_reward(code["ends_well"]).score(["Yes.", "Yes"]) == [1.0, 0.0]
    contains = create_reward(code["Contains"])
    assert contains.score(["A Cat", "dog"], row={"keywords": ["cat", "a"]}) == [1.0, 0.0]
    assert contains.score(["A Cat"], row={"keywords": []}) == [None]
    assert create_reward(code["shortest"]).score(["it is 4", "4", "5"], answer="4") == [0.0, 1.0, 0.0]
    assert code["reward"].score(["... \\boxed{72}", "#### 71"], answer="#### 72") == [1.0, 0.0]


@pytest.mark.slow
def test_configurations_of_the_page_are_valid() -> None:
    for block in blocks("yaml"):
        read = yaml.safe_load(block)
        listed = read if isinstance(read, list) else read.get("dataset", read)["reward_functions"]
        for spec in parse(DatasetConfig, {"reward_functions": listed}, str(PAGE)).rewards():
            if "my_rewards" not in str(spec):
                create_reward(spec)
