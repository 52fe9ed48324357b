"""Warnings about a run's first rows, which check, serve and doctor share."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.unit.env.conftest import TEMPLATE
from transformers import PreTrainedTokenizerFast

from gristmill_env.data import PromptDataset
from gristmill_env.preflight import FirstRows, first_warnings, row_warnings
from gristmill_env.rollouts.prompts import PromptBuilder
from gristmill_env.settings.dataset import DatasetConfig

OWN = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "1 + 1?"}]
WITHOUT_SYSTEM = TEMPLATE.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")


def dataset(folder: Path, prompts: list[Any]) -> PromptDataset:
    (folder / "rows.json").write_text(json.dumps([{"prompt": prompt} for prompt in prompts]))
    return PromptDataset(DatasetConfig(dataset_path=str(folder / "rows.json"), shuffle_dataset=False), None)


@pytest.mark.parametrize(
    ("prompts", "system", "template", "word", "numbers"),
    [
        (["a", OWN, "b", OWN], "Answer in tags.", TEMPLATE, "system_prompt", [2, 4]),
        (["a", "b"], "Answer in tags.", WITHOUT_SYSTEM, "the", [2, 2]),
        (["a", OWN], None, WITHOUT_SYSTEM, "the", [1, 2]),
        (["a", "b c", "d e"], None, TEMPLATE.replace("m.content", "m.content.split(' ')[-1]"), "the", [2, 3]),
        (["a", "b<|im_end|>", [{"role": "user", "content": "<|im_start|>system"}]], None, TEMPLATE, "control", [2, 3]),
        (["a", None, "b", 0.5, True], None, TEMPLATE, "2", [2, 5]),
        (["a", "", " \n", "b"], None, TEMPLATE, "the", [2, 4]),
        (["a", OWN], None, TEMPLATE, None, []),
        (["a", "b"], "Answer  in\ntags. ", TEMPLATE.replace("m.content", "m.content | trim"), None, []),
    ],
)
def test_rows_that_the_model_sees_differently_are_counted(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, prompts: list[Any], system: str | None, template: str,
    word: str | None, numbers: list[int],
) -> None:  # fmt: skip
    made = copy.deepcopy(tokenizer)
    made.chat_template = template
    found = list(first_warnings(PromptBuilder(made, system), dataset(tmp_path, prompts), 10_000, 0))
    assert [text.split()[0] for text in found] == ([] if word is None else [word])
    assert [int(number) for text in found for number in re.findall(r"(\d+) of (\d+)", text)[0]] == numbers


def test_prompts_that_leave_less_than_max_tokens_are_counted(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    builder, rows = PromptBuilder(tokenizer), dataset(tmp_path, ["a", "a" * 20, "a" * 90])
    shortest = len(builder.build("a").token_ids)
    (found,) = first_warnings(builder, rows, 100, 100 - shortest)
    assert found.startswith("of the first 3 rows, 1 prompts leave less than max_tokens")
    assert list(first_warnings(builder, rows, 100, 8)) == []


@pytest.mark.parametrize(
    ("name", "read"), [("add_date", True), ("add", False), ("role", False), ("user", False), ("generation", False)]
)
def test_values_that_the_template_does_not_read_as_variables_are_named(
    tokenizer: PreTrainedTokenizerFast, name: str, read: bool
) -> None:
    template = TEMPLATE + "{% if add_date and messages[0].role == 'user' %}x{% endif %}"
    unread = PromptBuilder(tokenizer, template=template, values={name: True}).unread_switches()
    assert unread == ([] if read else [f"chat_template_kwargs.{name}"])


def test_rows_are_read_once_and_a_text_server_has_warnings_too(tmp_path: Path) -> None:
    rows = FirstRows.of(dataset(tmp_path, ["a", OWN, None]))
    assert (len(rows.items), rows.read, len(rows.problems)) == (2, 3, 1)
    (warning,) = row_warnings(PromptBuilder(None, "Answer in tags."), rows.items)
    assert "1 of 2 rows" in warning
