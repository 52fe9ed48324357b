"""process, replay, sft and dpo one after the other, on a real vLLM's completions."""

from __future__ import annotations

import io
import json
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console
from tests.support.errors import raises
from tests.support.stack import Output, Vllm

from gristmill import Manifest
from gristmill_cli.local.processes import LocalStack
from gristmill_env.commands import COMMANDS, Invocation
from gristmill_env.errors import SavedError
from gristmill_env.rollouts.prompts import PromptBuilder, load_tokenizer
from gristmill_env.run_settings import RunSettings
from gristmill_env.saved import SavedGroup, read_groups

RUN = """
group_size: 4
max_num_workers: 4
max_token_length: 64
dataset:
  dataset_path: sums.jsonl
  prompt_field: question
  answer_field: answer
  system_prompt: Add.
  max_tokens: 12
  reward_functions:
    - {type: length, weight: 0.5, params: {target_tokens: 16}}
    - {type: accuracy}
"""

GUESS = """
environment: {type: guess, params: {tries: 4}}
"""


@dataclass
class Commands:
    """Runs commands in this process."""

    folder: Path
    vllm: Vllm

    @property
    def environ(self) -> dict[str, str]:
        return {
            "GRISTMILL_CONFIG_DIR": str(self.folder),
            "GRISTMILL_MODELS_DIR": str(self.vllm.models_dir),
            "GRISTMILL_MODEL_URL": self.vllm.url,
        }

    async def run(self, name: str, *flags: str) -> str:
        """Returns the output of the command. Raises the exception that the command raised."""
        command, console = COMMANDS[name], Console(file=io.StringIO(), width=160)
        launch, options = RunSettings.read_with(command.options, flags, self.environ, "test")
        await command.work(Invocation(launch, options, self.environ, console))
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()


@pytest.fixture
def commands(vllm: Vllm, tmp_path: Path) -> Commands:
    rows = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(12)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "sums.yaml").write_text(RUN)
    return Commands(tmp_path, vllm)


def saved(path: Path) -> list[SavedGroup]:
    return sorted(read_groups(path), key=lambda group: group.row or 0)


async def test_process_replay_sft_and_dpo_work_one_after_the_other(commands: Commands) -> None:
    out = commands.folder / "out"
    shown = await commands.run("process", "--config", "sums", "--groups", "6", "--out", str(out))
    groups = saved(out / "groups.jsonl")
    assert [group.row for group in groups] == list(range(6))
    prompts = PromptBuilder(load_tokenizer(Manifest.read(commands.vllm.models_dir).tokenizer_path), "Add.")
    for group in groups:
        assert group.messages == [{"role": "system", "content": "Add."}, {"role": "user", "content": group.prompt}]
        assert group.prompt_token_ids == list(prompts.build(group.prompt).token_ids)
        assert group.columns == {"question": group.prompt, "answer": group.answer}
        assert (group.run, group.model) == ("sums", Manifest.read(commands.vllm.models_dir).name)
        assert len(group.completions) == 4
        for completion in group.completions:
            assert completion.token_ids is not None
            assert completion.logprobs is not None
            assert len(completion.logprobs) == len(completion.token_ids) == completion.tokens
            assert completion.text == prompts.decode(completion.token_ids)
            length, accuracy = completion.scores["length"], completion.scores["accuracy"]
            assert length == min(1.0, len(completion.token_ids) / 16)
            assert accuracy is not None
            assert completion.total == pytest.approx(0.5 * length + accuracy)
    assert "6 groups, 24 completions" in shown
    page = (out / "groups.html").read_text()
    assert page.count('<details class="group"') == 6
    times = re.findall(r'<article data-score="[^"]*" data-times="(\d+)"', page)
    assert sum(map(int, times)) == 24, "equal completions share an article"

    shown = await commands.run("replay", "--saved", str(out / "groups.jsonl"), "--config", "sums")
    counted = " ".join(line for line in shown.splitlines() if " change " in line)
    assert re.findall(r"\d+ \w+", counted) == ["0 groups", "0 completions", "0 groups"]
    flags = ("--reward_functions", "length", "--out", str(out / "again.jsonl"))
    await commands.run("replay", "--saved", str(out / "groups.jsonl"), *flags)
    for old, new in zip(groups, saved(out / "again.jsonl"), strict=True):
        assert [c.total for c in new.completions] == [
            min(1.0, len(c.token_ids or ()) / 128) for c in old.completions
        ]  # fmt: skip

    await commands.run("dpo", "--saved", str(out / "again.jsonl"), "--out", str(out / "dpo.jsonl"))
    pairs = [json.loads(line) for line in (out / "dpo.jsonl").read_text().splitlines()]
    assert pairs
    assert all(pair["score_chosen"] > pair["score_rejected"] for pair in pairs)
    await commands.run("sft", "--saved", str(out / "groups.jsonl"), "--out", str(out / "sft.jsonl"), "--top_n", "2")
    for line in (out / "sft.jsonl").read_text().splitlines():
        assert [message["role"] for message in json.loads(line)["messages"]] == ["system", "user", "assistant"]


async def test_process_keeps_existing_groups_and_refuses_other_settings(commands: Commands) -> None:
    path = commands.folder / "groups.jsonl"
    flags = ("--config", "sums", "--out", str(path), "--max_token_length", "64")
    await commands.run("process", *flags, "--groups", "3")
    before = path.read_bytes()
    path.write_bytes(before + b'{"format":1,"torn')
    shown = await commands.run("process", *flags, "--groups", "5", "--max_num_workers", "1")
    assert f"3 groups are in {path} already" in " ".join(shown.split())
    assert path.read_bytes().startswith(before)
    assert [group.row for group in saved(path)] == list(range(5))
    with raises(SavedError, "config_differs", path=path, changed=["dataset.temperature: 1.0 -> 0.5"]):
        await commands.run("process", *flags, "--groups", "9", "--temperature", "0.5")
    assert len(saved(path)) == 5


async def test_process_skips_unusable_rows_with_a_reason(commands: Commands, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"question": "1 + 1?", "answer": "2"}, {"question": "1 + 1? " * 50, "answer": "2"}, {"question": "2 + 2?"}]
    (commands.folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = commands.folder / "groups.jsonl"
    await commands.run("process", "--config", "sums", "--out", str(out), "--groups", "3", "--no-shuffle_dataset")
    assert [group.index for group in saved(out)] == [0]
    told = [record.args for record in caplog.records if record.name == "gristmill_env.commands.process"]
    skipped = {args[0]: str(args[1]) for args in told if isinstance(args, tuple)}
    assert skipped[1].startswith("[prompt_too_long] ")
    assert skipped[2].startswith("[not_text] field 'answer' of row 2 of data set 'sums.jsonl' (split train) ")


@pytest.mark.long
def test_interrupted_process_keeps_its_groups_and_their_page(commands: Commands) -> None:
    out = commands.folder / "groups.jsonl"
    output = Output()
    flags = ["--config", "sums", "--out", str(out), "--groups", "100000", "--max_num_workers", "2"]
    with LocalStack(output.add) as stack:
        command = [sys.executable, "-m", "gristmill_env", "process", *flags]
        process = stack.start("env", command, commands.environ)
        _until(lambda: out.exists() and out.read_bytes().count(b"\n") > 3)
        process.process.send_signal(signal.SIGINT)
        assert process.process.wait(60) == 130
        process.reader.join(timeout=5)
    groups = saved(out)
    assert len(groups) > 3
    assert out.with_suffix(".html").read_text().count('<details class="group"') == len(groups)
    assert "Traceback" not in output.of("env")


async def test_process_saves_and_exports_conversations_of_several_turns(commands: Commands) -> None:
    config = (commands.folder / "sums.yaml").read_text().replace("- {type: accuracy}", "- {type: episode}")
    (commands.folder / "guess.yaml").write_text(config.replace("max_token_length: 64", "max_token_length: 256") + GUESS)
    out = commands.folder / "groups.jsonl"
    await commands.run("process", "--config", "guess", "--out", str(out), "--groups", "4")
    prompts = PromptBuilder(load_tokenizer(Manifest.read(commands.vllm.models_dir).tokenizer_path), "Add.")
    turned = [(group, c) for group in saved(out) for c in group.completions if c.messages is not None]
    assert turned
    for group, completion in turned:
        assert group.messages is not None
        assert completion.messages is not None
        roles = [message["role"] for message in completion.messages]
        assert roles == ["assistant", *["user", "assistant"] * (len(roles) // 2)]
        assert completion.messages[-1]["content"] == completion.text
        assert completion.mask is not None
        assert completion.tokens == completion.mask.count(True) == len(completion.sampled_ids or ())
        said = prompts.decode(completion.sampled_ids or ())
        assert said.startswith(completion.messages[0]["content"])
        assert completion.episode_reward == completion.scores["episode"]
    before = [c.total for group in saved(out) for c in group.completions]
    await commands.run("replay", "--saved", str(out), "--out", str(commands.folder / "again.jsonl"))
    again = saved(commands.folder / "again.jsonl")
    assert [c.total for group in again for c in group.completions] == before
    await commands.run("dpo", "--saved", str(out), "--out", str(commands.folder / "dpo.jsonl"), "--pairs", "9")
    for line in (commands.folder / "dpo.jsonl").read_text().splitlines():
        assert [message["role"] for message in json.loads(line)["prompt"]] == ["system", "user"]
        assert json.loads(line)["chosen"][0]["role"] == "assistant"


async def test_try_shows_five_items(commands: Commands) -> None:
    shown = await commands.run("try", "--config", "sums")
    assert "item 5: row" in shown
    assert "item 6" not in shown


def _until(true: Callable[[], bool], timeout: float = 120) -> None:
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
