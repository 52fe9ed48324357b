"""An unusable row is skipped and reported, and does not end a command. A server that refuses all rows does."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.support.errors import raises
from tests.unit.env.conftest import FailingServer, PassTime
from tests.unit.env.inference.conftest import CHAT, answers, said

from gristmill_env.commands import EvaluateOptions, ProcessOptions
from gristmill_env.commands.evaluate import run_evaluate
from gristmill_env.commands.process import process
from gristmill_env.commands.try_items import try_items
from gristmill_env.errors import EvaluationError, InferenceError
from gristmill_env.evaluation.folder import read_evaluation
from gristmill_env.run_settings import RunSettings
from gristmill_env.saved import read_groups

from .conftest import shown

pytestmark = pytest.mark.slow

LONG = "long " * 9
QUESTIONS: list[str | None] = [LONG, "1 + 1?", LONG, "2 + 2?", LONG]
REFUSAL = (400, {"error": {"code": "context_length_exceeded"}})


class Server:
    """A text server that refuses some prompts, or all of them."""

    def __init__(self, failing: FailingServer, refuses: set[str]) -> None:
        failing.takes_tokens = False
        failing.answers[CHAT] = self._answer
        self.url = failing.url
        self.refuses = refuses
        self._failing = failing

    @property
    def asked(self) -> list[str]:
        return [body["messages"][-1]["content"] for body in self._failing.bodies]

    def _answer(self) -> tuple[int, Any]:
        return REFUSAL if {"*", self.asked[-1]} & self.refuses else answers(said("2"))


def launch(folder: Path, url: str, questions: list[str | None] = QUESTIONS, **settings: Any) -> RunSettings:
    rows = [{"question": question, "answer": "2"} for question in questions]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = {
        "dataset_path": "rows.jsonl", "prompt_field": "question", "answer_field": "answer", "shuffle_dataset": False,
        "reward_functions": ["accuracy"],
    }  # fmt: skip
    run = {"dataset": dataset, "group_size": 1, "max_num_workers": 1, "max_eval_workers": 1} | settings
    (folder / "run.yaml").write_text(json.dumps(run))
    environ = {"GRISTMILL_MODELS_DIR": "/nowhere", "GRISTMILL_RUNS_DIR": str(folder / "runs")}
    return RunSettings.read(["--config", str(folder / "run.yaml"), "--base_url", url], environ, "test")


async def test_process_continues_after_a_prompt_that_the_server_refuses(
    tmp_path: Path, failing_server: FailingServer, console: Console
) -> None:
    server = Server(failing_server, {LONG})
    options = ProcessOptions(groups=5, out=tmp_path / "out")
    await process(launch(tmp_path, server.url), options, console)
    assert [group.row for group in read_groups(tmp_path / "out" / "groups.jsonl")] == [1, 3]
    assert "3 rows skipped: 3 prompt_refused" in shown(console)


async def test_evaluate_counts_a_refused_prompt_and_does_not_ask_it_again(
    tmp_path: Path, failing_server: FailingServer, console: Console
) -> None:
    server = Server(failing_server, {LONG})
    await run_evaluate(launch(tmp_path, server.url), EvaluateOptions(out=tmp_path / "out"), console)
    groups = read_evaluation(tmp_path / "out")
    assert [group.reason for group in groups] == ["prompt_refused", None, "prompt_refused", None, "prompt_refused"]
    assert "context_length_exceeded" in (groups[0].error or "")
    assert "not asked: 3 prompt_refused" in shown(console)
    await run_evaluate(launch(tmp_path, server.url), EvaluateOptions(out=tmp_path / "out", resume=True), console)
    assert server.asked.count(LONG) == 3


async def test_report_of_an_evaluation_on_training_rows_states_their_number(
    tmp_path: Path, failing_server: FailingServer, console: Console
) -> None:
    run = launch(tmp_path, Server(failing_server, set()).url, ["1 + 1?", "2 + 2?", "3 + 3?"])
    dataset = run.config.dataset.model_copy(update={"split": "train[:2]", "eval_split": "test"})
    run = dataclasses.replace(run, config=run.config.model_copy(update={"dataset": dataset}))
    await run_evaluate(run, EvaluateOptions(out=tmp_path / "out"), console)
    assert "2 of 3 rows of the evaluation are training rows" in shown(console)
    assert "of 3 prompts" in (tmp_path / "out" / "report.html").read_text()


async def test_process_skips_a_row_whose_rollout_exceeds_its_time(
    tmp_path: Path, failing_server: FailingServer, console: Console, pass_time: PassTime
) -> None:
    server, let_go = Server(failing_server, set()), threading.Event()

    def answer() -> tuple[int, Any]:
        if failing_server.now.body["messages"][-1]["content"] == LONG:
            pass_time(60)
            let_go.wait(60)
        return answers(said("2"))

    failing_server.answers[CHAT] = answer
    options = ProcessOptions(groups=5, out=tmp_path / "out")
    await process(launch(tmp_path, server.url, rollout_timeout=60, rollout_retries=0), options, console)
    let_go.set()
    assert [group.row for group in read_groups(tmp_path / "out" / "groups.jsonl")] == [1, 3]
    assert "3 rows skipped: 3 timeout" in shown(console)


@pytest.mark.parametrize("questions", [QUESTIONS, [LONG]])
async def test_command_ends_with_the_servers_message_if_every_prompt_is_refused(
    tmp_path: Path, failing_server: FailingServer, console: Console, questions: list[str | None]
) -> None:
    server = Server(failing_server, {"*"})
    with raises(InferenceError, "every_prompt_refused") as raised:
        await run_evaluate(launch(tmp_path, server.url, questions), EvaluateOptions(out=tmp_path / "out"), console)
    assert "HTTP 400" in str(raised.value)
    assert "context_length_exceeded" in str(raised.value)
    assert read_evaluation(tmp_path / "out") == [], "nothing is taken for done"


async def test_command_ends_if_the_server_starts_to_refuse_everything(
    tmp_path: Path, failing_server: FailingServer, console: Console
) -> None:
    server = Server(failing_server, {"2 + 2?", "Hi"})
    with raises(InferenceError, "every_prompt_refused"):
        await process(launch(tmp_path, server.url, ["1 + 1?", "2 + 2?"]), ProcessOptions(out=tmp_path / "o"), console)


HALF = r'{"question": "half \ud83d", "answer": "2"}'


async def test_process_and_evaluate_skip_a_row_with_half_a_character(
    tmp_path: Path, failing_server: FailingServer, console: Console
) -> None:
    run = launch(tmp_path, Server(failing_server, set()).url, ["1 + 1?", "2 + 2?"], data_path_to_save_groups="g.jsonl")
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write(HALF + "\n")
    await process(run, ProcessOptions(groups=3, out=tmp_path / "groups"), console)
    assert [group.row for group in read_groups(tmp_path / "groups" / "groups.jsonl")] == [0, 1]
    await run_evaluate(run, EvaluateOptions(out=tmp_path / "out"), console)
    group = read_evaluation(tmp_path / "out")[2]
    assert (group.reason, "field 'question' of row 2" in (group.error or "")) == ("bad_row", True)


async def test_half_a_character_in_the_error_of_a_reward_loses_no_group(
    tmp_path: Path, failing_server: FailingServer, console: Console
) -> None:
    (tmp_path / "mine.py").write_text("def mine(completion):\n    raise ValueError('half ' + chr(0xd83d))\n")
    run = launch(tmp_path, Server(failing_server, set()).url, ["1 + 1?"], reward_failure_limit=1)
    rewards = {"reward_functions": ["accuracy", str(tmp_path / "mine.py:mine")]}
    dataset = run.config.dataset.model_copy(update=rewards)
    run = dataclasses.replace(run, config=run.config.model_copy(update={"dataset": dataset}))
    await process(run, ProcessOptions(groups=1, out=tmp_path / "groups"), console)
    (group,) = read_groups(tmp_path / "groups" / "groups.jsonl")
    assert group.completions[0].error == "mine: ValueError: half \ufffd"


@pytest.mark.parametrize(
    ("body", "said"), [("raise KeyError('gone')", "mine: KeyError: 'gone'"), ("return None", "returned None")]
)
async def test_evaluate_ends_with_the_first_error_if_no_completion_has_a_score(
    tmp_path: Path, failing_server: FailingServer, console: Console, body: str, said: str
) -> None:
    (tmp_path / "mine.py").write_text(f"def mine(completion):\n    {body}\n")
    run = launch(tmp_path, Server(failing_server, set()).url)
    dataset = run.config.dataset.model_copy(update={"reward_functions": [str(tmp_path / "mine.py:mine")]})
    run = dataclasses.replace(run, config=run.config.model_copy(update={"dataset": dataset}))
    with raises(EvaluationError, "nothing_scored", completions=5, folder=tmp_path / "out") as raised:
        await run_evaluate(run, EvaluateOptions(out=tmp_path / "out"), console)
    assert said in str(raised.value)
    assert not (tmp_path / "out" / "results.json").exists()


async def test_try_shows_the_error_of_a_row_instead_of_the_item(
    tmp_path: Path, failing_server: FailingServer, console: Console
) -> None:
    server = Server(failing_server, {LONG})
    await try_items(launch(tmp_path, server.url, [LONG, None]), console)
    text = shown(console)
    assert "item 1" in text
    assert "context_length_exceeded" in text
    assert "item 2" in text
    assert "[not_text]" in text
    assert "'question'" in text


async def test_try_shows_the_failure_of_an_environment_instead_of_the_item(
    tmp_path: Path, failing_server: FailingServer, console: Console
) -> None:
    server = Server(failing_server, set())
    (tmp_path / "game.py").write_text(
        "from gristmill_env.environments import Environment\n"
        "class Game(Environment):\n"
        "    async def reset(self, item):\n"
        "        return item.messages\n"
        "    async def step(self, reply):\n"
        "        raise KeyError('no board')\n"
    )
    await try_items(launch(tmp_path, server.url, ["1 + 1?"], environment={"type": "game.py:Game"}), console)
    assert "item 1" in shown(console)
    assert "KeyError: 'no board'" in shown(console)


async def test_try_shows_each_turn_of_a_rollout(
    tmp_path: Path, failing_server: FailingServer, console: Console
) -> None:
    server = Server(failing_server, set())
    (tmp_path / "game.py").write_text(
        "from gristmill_env.data import user\n"
        "from gristmill_env.environments import Environment, StepResult\n"
        "class Game(Environment):\n"
        "    turns = 0\n"
        "    async def reset(self, item):\n"
        "        return item.messages\n"
        "    async def step(self, reply):\n"
        "        self.turns += 1\n"
        "        return StepResult((user('Are you sure?'),)) if self.turns == 1 else StepResult.end(1.0)\n"
    )
    await try_items(launch(tmp_path, server.url, ["1 + 1?"], environment={"type": "game.py:Game"}), console)
    lines = [" ".join(line.strip("│ ").split("│")[0].split()) for line in shown(console).splitlines()]
    assert [line for line in lines if line.startswith(("assistant: ", "user: "))][-3:] == [
        "assistant: 2", "user: Are you sure?", "assistant: 2",
    ]  # fmt: skip
