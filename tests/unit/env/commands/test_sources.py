"""Groups from other sources: saved by Atropos' environments, or archived by a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tests.support.errors import raises
from transformers import PreTrainedTokenizerFast

from gristmill import SamplingParams, TrajectoryGroup, VersionSpan
from gristmill.archive import segment
from gristmill_env.commands import DpoOptions, ReplayOptions, SftOptions
from gristmill_env.commands.export import dpo, sft
from gristmill_env.commands.replay import replay
from gristmill_env.commands.source import open_groups
from gristmill_env.errors import PromptError, SavedError
from gristmill_env.rollouts.prompts import PromptBuilder, load_tokenizer
from gristmill_env.run_settings import RunSettings
from gristmill_env.saved import SavedGroup
from gristmill_env.saved.reader import split_conversations

pytestmark = pytest.mark.slow

ROWS = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(5)]
SUMS = ["--dataset_path", "rows.jsonl", "--prompt_field", "question", "--answer_field", "answer"]


@pytest.fixture
def folder(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> Path:
    tokenizer.save_pretrained(str(tmp_path / "tokenizer"))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def settings_of(*flags: str, tokenizer: bool = True) -> RunSettings:
    named = ["--tokenizer_name", "tokenizer"] if tokenizer else []
    return RunSettings.read([*named, *flags], {"GRISTMILL_MODELS_DIR": "/nowhere"}, "test")


def groups_of(source: Path, *flags: str, tokenizer: bool = True) -> list[SavedGroup]:
    return list(open_groups(settings_of(*flags, tokenizer=tokenizer), source))


def scored(prompt: list[int], answers: list[list[int]], **fields: Any) -> dict[str, Any]:
    """A group as Atropos' base environment writes it."""
    return {
        "tokens": [prompt + answer for answer in answers],
        "masks": [[-100] * len(prompt) + answer for answer in answers],
        "scores": [1.0, -1.0],
        "inference_logprobs": [[1.0] * len(prompt) + [-0.5] * len(answer) for answer in answers],
        "advantages": None,
        "messages": None,
        "ref_logprobs": None,
        "overrides": None,
    } | fields


def test_atropos_groups_with_messages_need_no_tokenizer(folder: Path) -> None:
    asked = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 1?"}]
    messages = [[*asked, {"role": "assistant", "content": said}] for said in ("2", "3")]
    line = scored([1, 2], [[3, 4], [5]], messages=messages)
    path = folder / "their.jsonl"
    path.write_text(json.dumps(line) + "\n" + json.dumps([line, line]) + "\n")
    found = groups_of(path, tokenizer=False)
    assert len(found) == 3
    assert found[0].messages == asked
    assert (found[0].run, found[0].prompt, found[0].answer) == ("their", "1 + 1?", None)
    assert [(c.text, c.total, c.token_ids, c.logprobs) for c in found[0].completions] == [
        ("2", 1.0, [3, 4], [-0.5, -0.5]), ("3", -1.0, [5], [-0.5])
    ]  # fmt: skip


def test_atropos_groups_of_tokens_are_read_with_the_tokenizer(folder: Path) -> None:
    prompts = PromptBuilder(load_tokenizer("tokenizer"))
    prompt = prompts.build("1 + 1?")
    answers = [
        list(load_tokenizer("tokenizer")(said)["input_ids"]) for said in ("it is 2<|im_end|>", "it is 3<|im_end|>")
    ]
    # `include_messages` puts the whole sequence into one user message, which is not a conversation.
    filled = [[{"role": "user", "content": "whole"}]] * 2
    for messages in (None, filled, ["whole", "whole"]):
        path = folder / "their.jsonl"
        path.write_text(json.dumps(scored(list(prompt.token_ids), answers, messages=messages)) + "\n")
        (found,) = groups_of(path)
        assert found.prompt_text == prompt.text
        assert found.messages is None
        assert [c.text for c in found.completions] == ["it is 2", "it is 3"]
        with raises(PromptError, "no_tokenizer", source=path):
            groups_of(path, tokenizer=False)


@pytest.mark.parametrize(
    ("fields", "code", "values"),
    [
        ({"scores": [1.0]}, "length_mismatch", {"sequences": 2, "masks": 2, "scores": 1}),
        ({"masks": [[1], [1]]}, "length_mismatch", {"tokens": 4, "mask": 1}),
        ({"masks": [[-100] * 4, [-100] * 3]}, "nothing_trained", {}),
        ({"tokens": "no"}, "not_a_saved_group", {}),
    ],
)
def test_inconsistent_atropos_groups_are_named(
    folder: Path, fields: dict[str, Any], code: str, values: dict[str, Any]
) -> None:
    path = folder / "their.jsonl"
    path.write_text(json.dumps(scored([1, 2], [[3, 4], [5]], **fields)) + "\n")
    with raises(SavedError, code, where=f"line 1 of {path}", **values):
        groups_of(path)


def test_source_prompt_is_the_shared_conversation_before_the_answer() -> None:
    def turn(role: str, content: str) -> dict[str, str]:
        return {"role": role, "content": content}

    ask, hint, a, b = turn("user", "?"), turn("user", "no"), turn("assistant", "a"), turn("assistant", "b")
    assert split_conversations([[ask, a], [ask, b]]) == ([ask], [[a], [b]])
    assert split_conversations([[ask, a], [ask, a]]) == ([ask], [[a], [a]])
    assert split_conversations([[ask, a, hint, b]]) == ([ask, a, hint], [[b]])
    assert split_conversations([[ask, a, hint, b], [ask, b]]) == ([ask], [[a, hint, b], [b]])
    assert split_conversations([[ask, a, hint, a], [ask, a, turn("user", "so"), b]])[0] == [ask]


def archive(
    folder: Path, prompts: PromptBuilder, rows: list[int], *, untrained: Sequence[int] = (), **fields: Any
) -> Path:
    """Writes the files that the trajectory API leaves of a run that trained on these rows, one after another."""
    whole = segment.opening("sums", 1)
    tokenizer = load_tokenizer("tokenizer")
    for row in rows:
        prompt = list(prompts.build(ROWS[row % len(ROWS)]["question"]).token_ids)
        answers = [list(tokenizer(f"#### {row + 1}")["input_ids"]), [70]]
        sequences = [prompt + answer for answer in answers]
        mask = np.array([at >= len(prompt) for one in sequences for at in range(len(one))])
        mask[list(untrained)] = False
        body = TrajectoryGroup(
            group_id=f"g{row:08d}", run_id="sums", env_id="env", row=row,
            lengths=np.array([len(s) for s in sequences], np.int32),
            tokens=np.array([token for s in sequences for token in s], np.int32),
            logprobs=np.where(mask, np.float32(-0.5), np.float32(0)), mask=mask,
            rewards=np.array([1, 0], np.float32), reward_parts={"accuracy": [1.0, None]},
            finish_reasons=["stop", "length"],
            sampling=SamplingParams(temperature=1.0, max_tokens=8),
            versions=[[VersionSpan("1.10", 0, len(a))] for a in answers], **fields,
        ).encode()  # fmt: skip
        whole += segment.record(f"g{row:08d}", "group", body)
    (folder / "rollouts").mkdir(parents=True)
    (folder / "rollouts" / "000001.gmz").write_bytes(whole)
    return folder


def test_archived_groups_hold_text_and_scores(folder: Path) -> None:
    run = archive(folder / "runs" / "sums", PromptBuilder(load_tokenizer("tokenizer")), [0, 1])
    first, second = groups_of(run)
    assert (first.run, first.row, first.messages, first.answer) == ("sums", 0, None, None)
    assert first.prompt_text == "<|im_start|>user\n0 + 1?<|im_end|>\n<|im_start|>assistant\n"
    assert [(c.text, c.total, c.scores, c.finish_reason) for c in second.completions] == [
        ("#### 2", 1.0, {"accuracy": 1.0}, "stop"), ("g", 0.0, {"accuracy": None}, "length")
    ]  # fmt: skip
    assert first.versions == ["1.10"]
    assert first.completions[1].logprobs == [-0.5]


def test_source_reads_values_that_an_archive_lacks_from_the_data_set(folder: Path) -> None:
    run = archive(folder / "runs" / "sums", PromptBuilder(load_tokenizer("tokenizer")), [1, 7])
    first, second = groups_of(run, *SUMS, "--no-shuffle_dataset")
    assert (first.messages, first.answer) == ([{"role": "user", "content": "1 + 1?"}], "#### 2")
    assert (second.row, second.index, second.columns) == (7, 2, ROWS[2])
    with raises(SavedError, "prompt_differs", row=1):
        groups_of(run, *SUMS, "--shuffle_dataset", "--seed", "1")


def test_source_counts_the_prefill_as_part_of_the_answer(folder: Path) -> None:
    run = archive(folder / "runs" / "sums", PromptBuilder(load_tokenizer("tokenizer"), prefill="So: "), [1])
    (found,) = groups_of(run, *SUMS, "--no-shuffle_dataset", "--prefill", "So: ")
    assert found.messages == [{"role": "user", "content": "1 + 1?"}]
    assert [c.text for c in found.completions] == ["So: #### 2", "So: g"]


def test_source_keeps_the_turns_of_archived_conversations(folder: Path) -> None:
    ask, hint = {"role": "user", "content": "1 + 1?"}, {"role": "user", "content": "Lower."}
    long = [ask, {"role": "assistant", "content": "3"}, hint, {"role": "assistant", "content": "2"}]
    short = [ask, {"role": "assistant", "content": "2"}]
    run = archive(folder / "runs" / "sums", PromptBuilder(load_tokenizer("tokenizer")), [1], messages=[long, short])
    (found,) = groups_of(run, *SUMS, "--no-shuffle_dataset")
    assert (found.messages, found.answer) == ([ask], "#### 2")
    assert [(c.text, c.messages) for c in found.completions] == [("2", long[1:]), ("2", None)]


async def test_source_without_messages_keeps_several_turns_as_one_text(folder: Path, console: Console) -> None:
    prompts = PromptBuilder(load_tokenizer("tokenizer"))
    size = len(prompts.build("1 + 1?").token_ids)
    run = archive(folder / "run", prompts, [1], untrained=[size + 2])  # the third token is the environment's
    (found,) = groups_of(run, *SUMS, "--no-shuffle_dataset")
    first, second = found.completions
    assert found.messages is None
    assert found.answer == "#### 2"
    assert first.token_ids is not None
    assert first.mask is not None
    assert (first.tokens, len(first.token_ids), first.mask.count(False)) == (5, 6, 1)
    assert first.sampled_ids == first.token_ids[:2] + first.token_ids[3:]
    assert second.mask is None
    out = folder / "out.jsonl"
    for flags in ((), (*SUMS, "--no-shuffle_dataset")):
        settings = settings_of(*flags)
        for refused in (
            sft(settings, SftOptions(saved=run, out=out), console),
            dpo(settings, DpoOptions(saved=run, out=out), console),
            replay(settings, ReplayOptions(saved=run, out=out), console),
        ):
            with raises(SavedError, "turns_unknown", row=1):
                await refused
    assert not out.exists()


async def test_text_of_sequences_with_different_prompts_is_not_exported(folder: Path, console: Console) -> None:
    prompts = PromptBuilder(load_tokenizer("tokenizer"))
    size = len(prompts.build("1 + 1?").token_ids)
    run = archive(folder / "run", prompts, [1], untrained=[size, size + 1])  # the first prompt is longer by two tokens
    (found,) = groups_of(run)
    assert found.prompt_tokens == size
    assert [c.mask for c in found.completions] == [[False, False, True, True, True, True], None]
    with raises(SavedError, "turns_unknown", row=1):
        await sft(settings_of(), SftOptions(saved=run, out=folder / "out.jsonl"), console)


async def test_text_of_several_turns_is_not_exported_from_a_file_of_atropos(folder: Path, console: Console) -> None:
    tokens = [1, 2, 3, 4, 5]
    line = {"tokens": [tokens, tokens], "scores": [1.0, 0.0], "masks": [[-100, 2, -100, 4, 5], [-100, 2, 3, 4, 5]]}
    saved = folder / "theirs.jsonl"
    saved.write_text(json.dumps(line) + "\n")
    with raises(SavedError, "turns_unknown", row=None):
        await sft(settings_of(), SftOptions(saved=saved, out=folder / "out.jsonl"), console)


def test_prompt_that_an_environment_wrote_is_named_as_the_reason(folder: Path) -> None:
    run = archive(folder / "runs" / "sums", PromptBuilder(load_tokenizer("tokenizer")), [1])
    (folder / "run.yaml").write_text("environment: my_task.py:Sums\n")
    with raises(SavedError, "prompt_from_environment", row=1, writer="environment 'my_task.py:Sums'"):
        groups_of(run, *SUMS, "--shuffle_dataset", "--seed", "1", "--config", "run.yaml")
    (folder / "run.yaml").write_text("agent: {function: my_agent.py:run}\n")  # Its prompts have its tools.
    with raises(SavedError, "prompt_from_environment", row=1, writer="an agent"):
        groups_of(run, *SUMS, "--shuffle_dataset", "--seed", "1", "--config", "run.yaml")
