"""The messages and decisions of `serve` before a run exists. (tests/integration/env shows that it feeds a run.)"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest
from tests.support.errors import raises
from tests.unit.env.conftest import FailingServer
from tests.unit.env.test_groups import rollout_group
from transformers import PreTrainedTokenizerFast

from gristmill import ConfigError, GroupError, Permit, PolicyVersion, VersionSpan
from gristmill_env.errors import DropReason
from gristmill_env.inference import ModelServers
from gristmill_env.rewards import Score
from gristmill_env.run_settings import RunSettings
from gristmill_env.serve import ServeLoop, Worker, serve, worker_name
from gristmill_env.session import meet_model

ROW = '{"question": "1 + 1?", "answer": "2"}\n'
RUN = "dataset: {dataset_path: rows.jsonl, prompt_field: question, reward_functions: [length]}\n"


@pytest.fixture
def folder(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    tokenizer.save_pretrained(str(tmp_path / "tokenizer"))
    (tmp_path / "rows.jsonl").write_text(ROW)
    (tmp_path / "sums.yaml").write_text(RUN)
    return tmp_path


def launch(folder: Path, *flags: str) -> RunSettings:
    environ = {"GRISTMILL_RUNS_DIR": "/runs", "GRISTMILL_MODELS_DIR": "/nowhere"}
    named = ("--tokenizer_name", str(folder / "tokenizer"))
    return RunSettings.read(["--config", str(folder / "sums.yaml"), *named, *flags], environ, "test")


def test_relative_path_for_saved_groups_is_in_the_runs_folder(folder: Path) -> None:
    assert launch(folder).groups_file is None
    assert launch(folder, "--data_path_to_save_groups", "kept/g.jsonl").groups_file == Path("/runs/sums/kept/g.jsonl")
    assert launch(folder, "--data_path_to_save_groups", "/data/g.jsonl").groups_file == Path("/data/g.jsonl")


async def test_group_that_cannot_be_encoded_is_dropped_and_the_run_goes_on() -> None:
    loop, permit = Mock(_run_id="r", _worker_id="e"), Permit(group_id="g00000000", row=0)
    loop._config.include_messages = False
    loop._permits.submit = AsyncMock(side_effect=GroupError("objects_too_large", "it carries too much"))
    loop._drop = AsyncMock()
    source = Mock(**{"task.scorer.correctness": None})
    scored, versions = rollout_group(Score(0.0, {}), Score(1.0, {})), [[VersionSpan("1.3", 0, 1)]] * 2
    await ServeLoop._submit(loop, permit, source, scored, versions, PolicyVersion(1, 3), Mock(), None)
    (arguments,) = (call.args for call in loop._drop.await_args_list)
    assert arguments[:2] == (permit, DropReason.REFUSED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "takes_tokens", "warned"),
    [
        (("--max_reasoning_tokens", "64"), True, True),
        (("--max_reasoning_tokens", "64"), False, False),
        (("--reasoning_effort", "low"), True, False),
    ],
)
async def test_unenforced_max_reasoning_tokens_gives_a_warning(
    folder: Path, failing_server: FailingServer, caplog: pytest.LogCaptureFixture,
    flags: tuple[str, ...], takes_tokens: bool, warned: bool,
) -> None:  # fmt: skip
    failing_server.takes_tokens = takes_tokens
    asked = launch(folder, "--base_url", failing_server.url, *flags)
    async with ModelServers(asked.config.server_configs, patience=1) as server:
        await meet_model(asked, server, 2)
    assert ("max_reasoning_tokens" in caplog.text) == warned


def launch_with_trainer(folder: Path, trainer: str, *flags: str) -> RunSettings:
    """A run with groups of 8. `trainer`: the trainer.yaml."""
    (folder / "trainer.yaml").write_text(trainer)
    environ = {"GRISTMILL_RUNS_DIR": "/runs", "GRISTMILL_MODELS_DIR": "/nowhere", "GRISTMILL_CONFIG_DIR": str(folder)}
    named = ("--tokenizer_name", str(folder / "tokenizer"))
    given = ["--config", "sums", *named, "--group_size", "8", "--startup_patience", "1", *flags]
    return RunSettings.read(given, environ, "test")


async def test_serve_refuses_a_step_of_partial_groups_before_it_opens_the_run(
    folder: Path, failing_server: FailingServer
) -> None:
    (folder / "sums.yaml").write_text(RUN + "trainer: {batch_size: 10}\n")
    asked = launch_with_trainer(folder, "max_grad_norm: 1.0\n", "--base_url", failing_server.url)
    with raises(ConfigError, "partial_groups", sequences=10, group_size=8):
        await serve(asked, {})


@pytest.mark.parametrize(
    ("block", "trainer"),
    [
        ("{batch_size: 10}", "gradient_accumulation_steps: 4\n"),
        ("{gradient_accumulation_steps: 2}", "batch_size: 4\n"),
        ("{batch_size: 10}", "push_to_hub: ${ONLY_THE_TRAINER_HAS_IT}\n"),
        ("{learning_rate: 1.0e-6}", "batch_size: 10\n"),  # the trainer's command line may complete it
    ],
)
def test_step_that_the_trainer_may_complete_to_whole_groups_passes(folder: Path, block: str, trainer: str) -> None:
    (folder / "sums.yaml").write_text(RUN + f"trainer: {block}\n")
    launch_with_trainer(folder, trainer).check_step_size()


def test_step_of_a_run_is_not_completed_without_the_trainers_file(folder: Path) -> None:
    (folder / "sums.yaml").write_text(RUN + "trainer: {batch_size: 10}\n")
    asked = launch_with_trainer(folder, "")
    (folder / "trainer.yaml").unlink()
    asked.check_step_size()


_HOLDS_A_NAME = """
import time
from gristmill_env.serve import worker_name
with worker_name() as worker:
    print(*worker, flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_successor_of_a_killed_environment_takes_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    command = [sys.executable, "-c", _HOLDS_A_NAME]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = Worker(*process.stdout.readline().split())
        with worker_name() as second:
            assert second.name != first.name, "both environments run"
            assert second.word != first.word
            process.kill()
            process.wait()
            with worker_name() as successor:
                assert successor == first, "the word too: it takes the registration over"
