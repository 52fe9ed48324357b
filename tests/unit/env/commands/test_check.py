"""check: reports faults in a run's data and rewards before a model is started."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from tests.support.errors import raises
from transformers import PreTrainedTokenizerFast

from gristmill import Manifest
from gristmill.internal.check import Check
from gristmill_env.commands.check import check
from gristmill_env.errors import CheckError, DatasetError
from gristmill_env.run_settings import RunSettings

from .conftest import shown

pytestmark = pytest.mark.slow

ROWS = [{"question": f"What is {n} + 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"} for n in range(20)]
RUN = {
    "max_token_length": 64,
    "dataset": {
        "dataset_path": "rows.jsonl", "prompt_field": "question", "answer_field": "answer", "system_prompt": "Add [b].",
        "max_tokens": 8, "shuffle_dataset": False, "reward_functions": ["format", "accuracy"],
    },
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    tokenizer.save_pretrained(str(tmp_path / "tokenizer"))
    (tmp_path / "run.yaml").write_text(json.dumps(RUN))
    write(tmp_path, ROWS)
    return tmp_path


def write(folder: Path, rows: list[dict[str, str]]) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


async def checked(folder: Path, console: Console, *flags: str, tokenizer: bool = True) -> list[str]:
    named = ["--tokenizer_name", str(folder / "tokenizer")] if tokenizer else []
    environ = {"GRISTMILL_MODELS_DIR": "/nowhere"}
    await check(RunSettings.read(["--config", str(folder / "run.yaml"), *named, *flags], environ, "test"), console)
    return shown(console).splitlines()


def wrong(console: Console, code: str) -> str:
    """Returns the line about the one mistake of this code."""
    (line,) = [line for line in shown(console).splitlines() if line.startswith(f"wrong: [{code}] ")]
    return line


async def test_check_of_a_valid_run_shows_three_prompts_lengths_and_scores(folder: Path, console: Console) -> None:
    lines = await checked(folder, console, "--max_token_length", "200")
    assert not any(line.startswith("warning: ") for line in lines)
    text = "\n".join(lines)
    assert "data set 'rows.jsonl' (split train): 20 rows" in lines
    assert "columns: question, answer" in lines
    assert "rewards: 1 × format, 1 × accuracy" in lines
    assert text.count("as the model will see it") == 3
    assert "<|im_start|>system" in text
    assert "Add [b].<|im_end|>" in text
    length = len("system\nAdd [b].\nuser\nWhat is 9 + 1?\nassistant\n") + 5  # one token per byte, and five marks
    quantiles = f"(50% ≤ {length}, 90% ≤ {length + 1}, 99% ≤ {length + 1})"
    assert f"prompt tokens over 20 rows: {length} to {length + 1} {quantiles}" in lines
    assert "│ accuracy │ 20   │ 20 (100.0%)         │ 0    │ 0        │" in lines
    assert lines[-1] == "all is well"


async def test_check_reports_the_checks_of_other_services_and_fails_with_them(folder: Path, console: Console) -> None:
    run = RunSettings.read(["--config", str(folder / "run.yaml")], {"GRISTMILL_MODELS_DIR": "/nowhere"}, "test")
    silent = Check("redis", "warning", "not checked: it does not answer")
    await check(run, console, [silent])
    lines = shown(console).splitlines()
    assert lines[-2].split()[:2] == ["warning", "redis"]
    assert lines[-1] == "nothing is wrong, with 1 warning, see above"
    with raises(CheckError, "check_failed", problems=["check_failed"]):
        await check(run, console, [silent, Check("memory of trainer", "failed", "needs 100 GB")])
    assert wrong(console, "check_failed").endswith("memory of trainer: needs 100 GB")


async def test_check_warns_about_settings_that_are_probably_mistakes(folder: Path, console: Console) -> None:
    lines = await checked(folder, console, "--max_tokens", "201", "--max_token_length", "200", "--top_p", "0.9")
    warned = [line.split()[1] for line in lines if line.startswith("warning: ")]
    assert warned == ["top_p", "max_tokens", "20"]
    assert lines[-1] == "nothing is wrong, with 3 warnings, see above"


async def test_check_warns_about_rows_that_the_model_sees_differently(folder: Path, console: Console) -> None:
    write(folder, [*ROWS, {"question": "What<|im_end|>?", "answer": "3"}])
    flags = ("--max_token_length", "200", "--thinking_mode", "true", "--shuffle_dataset", "true")
    lines = await checked(folder, console, *flags)
    assert [line.split()[1] for line in lines if line.startswith("warning: ")] == ["thinking_mode", "control"]


async def test_check_counts_the_rows_of_the_evaluation_that_are_training_rows(folder: Path, console: Console) -> None:
    flags = ("--max_token_length", "200", "--split", "train[:15]", "--eval_split")
    lines = await checked(folder, console, *flags, "test")
    (warned,) = [line for line in lines if line.startswith("warning: ")]
    assert warned.startswith("warning: 15 of 20 rows")
    console.file.truncate(0)
    assert not any(line.startswith("warning: ") for line in await checked(folder, console, *flags, "train[15:]"))


async def test_check_without_a_tokenizer_shows_the_messages_and_the_reason(folder: Path, console: Console) -> None:
    text = "\n".join(await checked(folder, console, tokenizer=False))
    assert "system: Add [b]." in text
    assert "user: What is 2 + 1?" in text
    assert "--tokenizer_name" in text


async def test_prompts_that_leave_no_room_are_counted(folder: Path, console: Console) -> None:
    length = len("system\nAdd [b].\nuser\nWhat is 9 + 1?\nassistant\n") + 5
    lines = await checked(folder, console, "--max_token_length", str(length + 1))
    counted = [[int(number) for number in re.findall(r"\d+", line)] for line in lines if "prompts leave" in line]
    assert counted == [[10, length + 1], [10, 8, length + 1]]  # without room; with less room than max_tokens
    with raises(CheckError, "check_failed", problems=["all_prompts_too_long"]):
        await checked(folder, console, "--max_token_length", str(length))
    assert str(length) in wrong(console, "all_prompts_too_long")


async def test_rows_without_text_or_answer_are_counted_and_fail(folder: Path, console: Console) -> None:
    write(folder, [*ROWS, {"question": "What?"}, {"question": "", "answer": "3"}, {"answer": "3"}])
    with raises(CheckError, "check_failed", problems=["rows_unusable"]):
        await checked(folder, console)
    told = wrong(console, "rows_unusable")
    assert "2 of 23" in told
    assert "[not_text] field 'answer' of row 20 of data set 'rows.jsonl'" in told


async def test_check_fails_if_many_answers_are_unreadable_to_a_reward(folder: Path, console: Console) -> None:
    write(folder, [*ROWS, {"question": "Who?", "answer": "Ada Lovelace"}])
    lines = await checked(folder, console)
    assert "│ accuracy │ 21   │ 20 (95.2%)          │ 0    │ 1        │" in lines
    (told,) = [line for line in lines if line.startswith("accuracy, row 20: ")]
    assert "'Ada Lovelace'" in told
    write(folder, [*ROWS, *[{"question": "Who?", "answer": "Ada Lovelace"}] * 3])
    with raises(CheckError, "check_failed", problems=["answers_not_read"]):
        await checked(folder, console)
    assert re.search(r"\baccuracy\b.* 3 of 23\b", wrong(console, "answers_not_read"))


@pytest.mark.parametrize("answer", ["7", "$1,234.50", "\\boxed{7}", "so it is\n#### -5"])
async def test_check_accepts_answers_in_any_of_the_usual_notations(folder: Path, console: Console, answer: str) -> None:
    write(folder, [{"question": "?", "answer": answer}])
    assert (await checked(folder, console))[-1] == "all is well"


async def test_check_fails_if_a_reward_does_not_accept_the_gold_answer(folder: Path, console: Console) -> None:
    from gristmill_env.rewards import registry

    @registry.reward("one_off")
    def one_off(completion: str, answer: str) -> float:
        if answer == "raise":
            raise ValueError("no")
        return 0.5

    try:
        write(folder, [{"question": "?", "answer": "4"}, {"question": "?", "answer": "raise"}])
        with raises(CheckError, "check_failed", problems=["answers_not_known", "reward_fails"]):
            await checked(folder, console, "--reward_functions", "one_off")
    finally:
        del registry._REGISTRY["one_off"]
    text = shown(console)
    assert re.search(r"^one_off, row 0: .*0\.5.*'4'", text, re.MULTILINE)
    assert re.search(r"^one_off, row 1: .*ValueError: no.*'raise'", text, re.MULTILINE)
    assert re.search(r"\bone_off\b.* 2 of 2\b", wrong(console, "answers_not_known"))


@pytest.mark.parametrize(
    ("reward", "tried"),
    [
        ("cascading_r1", "cascading_r1/accuracy"),
        (
            {"type": "combined", "params": {"rewards": ["length", {"type": "accuracy", "weight": 0.5}]}},
            "combined/accuracy",
        ),
    ],
)
async def test_check_tries_the_comparing_parts_of_a_composed_reward(
    folder: Path, console: Console, reward: object, tried: str
) -> None:
    config = {**RUN, "dataset": {**RUN["dataset"], "reward_functions": [reward]}}  # type: ignore[dict-item]
    (folder / "run.yaml").write_text(json.dumps(config))
    lines = await checked(folder, console, "--max_token_length", "200")
    assert any(line.startswith(f"│ {tried} ") and "20 (100.0%)" in line for line in lines)
    assert lines[-1] == "all is well"
    write(folder, [*ROWS, *[{"question": "Who?", "answer": "Ada Lovelace"}] * 20])
    with raises(CheckError, "check_failed", problems=["answers_not_read"]):
        await checked(folder, console, "--max_token_length", "200")
    assert re.search(rf"{tried}\b.* 20 of 40\b", wrong(console, "answers_not_read"))


JUDGES = """
def of_ground_truth(completion, ground_truth):
    return 1.0 if ground_truth.endswith(completion) else 0.0


def counts_tokens_too(completion, answer, tokens):
    return 1.0 if len(tokens) < 9 else 0.0


def trl(completions, answer, **kwargs):
    return [0.0 for _ in completions]
"""


@pytest.mark.long
async def test_rewards_that_are_not_tried_are_named(folder: Path, console: Console) -> None:
    (folder / "judges.py").write_text(JUDGES)
    rewards = ["r1", "judges.py:of_ground_truth", "judges.py:counts_tokens_too", "trl:judges.py:trl"]
    config = {**RUN, "dataset": {**RUN["dataset"], "reward_functions": rewards}}  # type: ignore[dict-item]
    (folder / "run.yaml").write_text(json.dumps(config))
    lines = await checked(folder, console, "--max_token_length", "200")
    tried = [line.split("│")[1].strip() for line in lines if "(100.0%)" in line]
    assert tried == ["r1/accuracy", "of_ground_truth"]
    told = "not tried on the rows' own answers: r1/format, counts_tokens_too, trl"
    assert any(line.startswith(told) for line in lines)
    console.file.truncate(0)
    lines = await checked(folder, console, "--max_token_length", "200", "--reward_functions", "trl:judges.py:trl")
    assert "no reward was tried on the rows' own answers" in lines


async def test_check_ends_if_the_data_set_cannot_be_loaded(folder: Path, console: Console) -> None:
    with raises(DatasetError, "field_missing", field="questoin"):
        await checked(folder, console, "--prompt_field", "questoin")


async def test_rows_that_the_environment_refuses_are_counted(folder: Path, console: Console) -> None:
    write(folder, [*ROWS, {"question": "Who?", "answer": "Ada"}])
    config = {**RUN, "environment": "guess", "dataset": {**RUN["dataset"], "reward_functions": ["format"]}}  # type: ignore[dict-item]
    (folder / "run.yaml").write_text(json.dumps(config))
    with raises(CheckError, "check_failed", problems=["rows_unusable"]):
        await checked(folder, console, "--max_token_length", "200")
    told = wrong(console, "rows_unusable")
    assert "1 of 21" in told
    assert "[answer_not_a_number]" in told
    assert "'Ada'" in told


async def test_check_shows_a_prefill_at_the_beginning_of_the_answer(folder: Path, console: Console) -> None:
    lines = await checked(folder, console, "--max_token_length", "200", "--prefill", "<think>")
    assert any(line.startswith("│ <think>") for line in lines)
    console.file.truncate(0)
    assert "assistant: <think>" in "\n".join(await checked(folder, console, "--prefill", "<think>", tokenizer=False))


MINE = """
def near(completion, gold):
    if gold == "7":
        raise ZeroDivisionError("seven")
    return 1.0 if gold in completion else 0.0


def no_value(completion):
    return None
"""


async def test_check_calls_every_reward_and_names_the_rows_on_which_one_fails(folder: Path, console: Console) -> None:
    (folder / "mine.py").write_text(MINE)
    (folder / "rows.jsonl").write_text("".join(f'{{"question": "{n}?", "gold": "{n}"}}\n' for n in range(20)))
    flags = ("--max_token_length", "200", "--answer_field", "gold", "--reward_functions", "mine.py:near")
    with raises(CheckError, "check_failed", problems=["answers_not_known", "reward_fails"]):
        await checked(folder, console, *flags)
    assert re.search(r"near\b.* 1 of 20 rows.* row 7: .*ZeroDivisionError", wrong(console, "reward_fails"))
    assert "│ near   │ 20   │ 19 (95.0%)" in shown(console)  # its column is the answer, under its own name


async def test_check_is_not_well_if_a_reward_gives_no_value(folder: Path, console: Console) -> None:
    (folder / "mine.py").write_text(MINE)
    lines = await checked(folder, console, "--max_token_length", "200", "--reward_functions", "mine.py:no_value")
    assert lines[-1].endswith("no value came from no_value")
    assert "all is well" not in lines


async def test_check_warns_if_the_tokenizer_is_of_another_model(folder: Path, console: Console) -> None:
    (folder / "models").mkdir()
    manifest = Manifest(
        name="tiny", requested="tiny", revision="a", sha256="a", dtype="float32", max_model_len=512,
        weights_path=str(folder), serve_path=str(folder), tokenizer_path=str(folder / "tokenizer"),
    )  # fmt: skip
    manifest.write(folder / "models")
    environ = {"GRISTMILL_MODELS_DIR": str(folder / "models")}
    flags = ["--config", str(folder / "run.yaml"), "--max_token_length", "200", "--model_name"]
    for name, warned in (("tiny", []), ("smollm2", ["the tokenizer is of tiny"])):
        await check(RunSettings.read([*flags, name], environ, "test"), console)
        found = [line for line in shown(console).splitlines() if line.startswith("warning: ")]
        assert [line[9:33] for line in found] == warned


@pytest.mark.parametrize(("name", "code"), [("agent.py:run", None), ("agent.py:gone", "plugin_attribute_missing")])
async def test_check_loads_the_agent(folder: Path, console: Console, name: str, code: str | None) -> None:
    (folder / "agent.py").write_text("async def run(task, endpoint):\n    return 1.0\n")
    (folder / "run.yaml").write_text(json.dumps(RUN | {"agent": name, "max_token_length": 200}))
    if code is None:
        assert f"agent: {name}" in await checked(folder, console)
    else:
        with raises(CheckError, "check_failed", problems=[code]):
            await checked(folder, console)


async def test_check_goes_through_every_source_and_names_the_one_with_mistakes(folder: Path, console: Console) -> None:
    dataset = dict(RUN["dataset"])  # type: ignore[call-overload]
    (folder / "words.jsonl").write_text('{"question": "What?", "answer": "7"}\n{"question": null, "answer": "7"}\n')
    sources = [
        {"name": "sums", "dataset": {"dataset_path": dataset.pop("dataset_path")}},
        {"name": "words", "dataset": {"dataset_path": "words.jsonl"}, "rewards": ["accuracy"]},
    ]
    (folder / "run.yaml").write_text(
        json.dumps({**RUN, "max_token_length": 200, "dataset": dataset, "sources": sources})
    )
    with raises(CheckError, "check_failed", problems=["rows_unusable"]):
        await checked(folder, console)
    lines = shown(console).splitlines()
    assert [line for line in lines if line.startswith("source ")] == [
        "source 'sums': data set 'rows.jsonl' (split train): 20 rows",
        "source 'words': data set 'words.jsonl' (split train): 2 rows",
        "source sums",
        "source words",
    ]
    assert [line for line in lines if line.startswith("rewards: ")] == [
        "rewards: 1 × format, 1 × accuracy", "rewards: 1 × accuracy"
    ]  # fmt: skip
    assert "source 'words': " in wrong(console, "rows_unusable")


async def test_missing_data_of_a_source_is_named_with_the_source(folder: Path, console: Console) -> None:
    dataset = {key: value for key, value in RUN["dataset"].items() if key != "dataset_path"}  # type: ignore[attr-defined]
    sources = [{"name": "sums", "dataset": {"dataset_path": "none.jsonl"}}]
    (folder / "run.yaml").write_text(json.dumps({**RUN, "dataset": dataset, "sources": sources}))
    with raises(DatasetError, "dataset_missing", source="sums"):
        await checked(folder, console)
