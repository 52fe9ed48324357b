"""docs/from-trl.md has all arguments of TRL's GRPO trainer, and every argument and key that it names exists."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import yaml
from transformers import TrainingArguments
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from gristmill import Hyperparameters
from gristmill_env.settings.run import EnvConfig

pytestmark = pytest.mark.slow

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE = (DOCS / "from-trl.md").read_text()
TABLES = PAGE.partition("<!-- arguments:")[2].partition("<!-- end of arguments -->")[0]
ARGUMENTS = {field.name for field in dataclasses.fields(GRPOConfig)} | {*inspect.signature(GRPOTrainer).parameters}
COMMON = {field.name for field in dataclasses.fields(TrainingArguments)}


def column(text: str, number: int) -> list[str]:
    """Returns the names in a column of all tables of a text."""
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`(\w+)`", row[number])]


def test_every_argument_of_the_page_exists_and_has_one_row() -> None:
    named = column(TABLES, 0)
    assert set(named) <= ARGUMENTS
    assert len(named) == len(set(named))


def test_page_has_every_argument_of_the_grpo_trainer() -> None:
    assert ARGUMENTS - COMMON - {"args"} - set(column(TABLES, 0)) == set()


def test_every_key_of_the_page_exists() -> None:
    """The tables of configuration.md are generated from the settings."""
    known = set(column((DOCS / "configuration.md").read_text(), 0))
    named = set(column(TABLES.partition("### Without a key")[0], 1))
    assert len(named) > 40
    assert named <= known


def test_example_is_a_valid_configuration() -> None:
    (example,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    config = EnvConfig.model_validate(yaml.safe_load(example))
    assert Hyperparameters.model_validate(config.trainer).training_steps == 100
