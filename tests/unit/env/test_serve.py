"""What `serve` says and resolves before there is a run to feed. (That it feeds one is in tests/integration/env.)"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.env.conftest import FailingServer
from transformers import PreTrainedTokenizerFast

from gristmill_env.inference import ModelServers
from gristmill_env.launch import Launch
from gristmill_env.prepare import Task, meet_model
from gristmill_env.serve import groups_file

ROW = '{"question": "1 + 1?", "answer": "2"}\n'
RUN = "dataset: {dataset_path: rows.jsonl, prompt_field: question, reward_functions: [length]}\n"


@pytest.fixture
def folder(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    tokenizer.save_pretrained(str(tmp_path / "tokenizer"))
    (tmp_path / "rows.jsonl").write_text(ROW)
    (tmp_path / "sums.yaml").write_text(RUN)
    return tmp_path


def launch(folder: Path, *flags: str) -> Launch:
    environ = {"GRISTMILL_RUNS_DIR": "/runs", "GRISTMILL_MODELS_DIR": "/nowhere"}
    named = ("--tokenizer_name", str(folder / "tokenizer"))
    return Launch.read(["--config", str(folder / "sums.yaml"), *named, *flags], environ, "test")


def test_a_relative_file_of_groups_is_in_the_runs_folder(folder: Path) -> None:
    assert groups_file(launch(folder)) is None
    assert groups_file(launch(folder, "--data_path_to_save_groups", "kept/g.jsonl")) == Path("/runs/sums/kept/g.jsonl")
    assert groups_file(launch(folder, "--data_path_to_save_groups", "/data/g.jsonl")) == Path("/data/g.jsonl")


@pytest.mark.parametrize(
    ("flags", "takes_tokens", "warned"),
    [
        (("--max_reasoning_tokens", "64"), True, True),
        (("--max_reasoning_tokens", "64"), False, False),
        (("--reasoning_effort", "low"), True, False),
    ],
)
async def test_a_limit_of_thought_that_nothing_enforces_is_warned_of(
    folder: Path, failing_server: FailingServer, caplog: pytest.LogCaptureFixture,
    flags: tuple[str, ...], takes_tokens: bool, warned: bool,
) -> None:  # fmt: skip
    failing_server.takes_tokens = takes_tokens
    asked = launch(folder, "--base_url", failing_server.url, *flags)
    task = Task.load(asked)
    async with task, ModelServers(asked.config.server_configs, patience=1) as server:
        await meet_model(asked, task, server, 2)
    assert ("max_reasoning_tokens has no effect" in caplog.text) == warned
