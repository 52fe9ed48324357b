"""sft and dpo: which parts of a group are exported, which are left out and why. Trainers can read the exports."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.support.errors import raises

from gristmill_env.commands import DpoOptions, SftOptions
from gristmill_env.commands.export import LeftOut, best, dpo, pairs, sft
from gristmill_env.errors import SavedError
from gristmill_env.run_settings import RunSettings
from gristmill_env.saved import SavedGroup

from .conftest import completion, group, names_in, save, shown

LAUNCH = RunSettings.read([], {"GRISTMILL_MODELS_DIR": "/nowhere"}, "test")


def taken(one: SavedGroup, **options: Any) -> tuple[list[str], dict[str, int]]:
    left_out: Counter[LeftOut] = Counter()
    rows = best(one, SftOptions(saved=Path("a"), out=Path("b"), **options), left_out)
    said = [json.loads(json.dumps(row.messages))[-1]["content"] for row in rows if hasattr(row, "messages")]
    return said, {str(reason): count for reason, count in left_out.items() if count}


def paired(one: SavedGroup, **options: Any) -> tuple[list[tuple[str, str]], dict[str, int]]:
    left_out: Counter[LeftOut] = Counter()
    rows = list(pairs(one, DpoOptions(saved=Path("a"), out=Path("b"), **options), left_out))
    assert all(row.score_chosen > row.score_rejected for row in rows)
    said = [(row.chosen[-1]["content"], row.rejected[-1]["content"]) for row in rows if isinstance(row.chosen, list)]
    return said, {str(reason): count for reason, count in left_out.items() if count}


MIXED = group(
    completion("worst", -1.0),
    completion("good", 0.8),
    completion("best", 1.0),
    completion("best", 1.0),
    completion("cut", 1.5, finish_reason="length"),
    completion("odd", None),
    completion("zero", 0.0),
)


def test_sft_takes_the_best_of_a_group_and_counts_the_others() -> None:
    assert taken(MIXED) == (
        ["best"],
        {LeftOut.NO_SCORE: 1, LeftOut.TWICE: 1, LeftOut.CUT: 1, LeftOut.NOT_BEST: 1, LeftOut.LOW: 2},
    )
    assert taken(MIXED, top_n=9)[0] == ["best", "good"]
    assert taken(MIXED, top_n=9, min_score=-5)[0] == ["best", "good", "zero", "worst"]
    assert taken(MIXED, min_score=0.81, top_n=9)[0] == ["best"]
    assert taken(MIXED, min_score=1.1)[0] == []


def test_dpo_takes_the_pair_that_differs_most_and_prefers_no_truncated_answer() -> None:
    assert paired(MIXED) == ([("best", "worst")], {LeftOut.NO_SCORE: 1, LeftOut.TWICE: 1})
    assert paired(MIXED, pairs=3)[0] == [("best", "worst"), ("good", "worst"), ("best", "zero")]
    assert paired(MIXED, pairs=99, min_difference=1.5)[0] == [("best", "worst"), ("good", "worst")]
    assert paired(MIXED, min_difference=2.1) == ([], {LeftOut.NO_SCORE: 1, LeftOut.TWICE: 1, LeftOut.NO_PAIR: 1})
    tie = group(completion("a", 0.1 + 0.2), completion("b", 0.3))
    assert paired(tie, pairs=9) == ([], {LeftOut.NO_PAIR: 1})
    cut = group(completion("a", 1.0, finish_reason="length"), completion("b", 0.5), completion("c", 0.5))
    assert paired(cut)[0] == []
    worse = group(completion("a", 1.0), completion("b", 0.5, finish_reason="length"))
    assert paired(worse)[0] == [("a", "b")]


def test_dpo_pairs_only_answers_to_one_prompt() -> None:
    own = [{"role": "user", "content": "Other?"}, {"role": "assistant", "content": "b"}]
    branches = group(completion("a", 1.0), completion("b", 0.5, messages=own), completion("c", 0.2))
    assert paired(branches) == ([("a", "c")], {LeftOut.OWN_PROMPT: 1})
    tools = group(completion("a", 1.0), completion("b", 0.5, tools=[{"type": "function"}]), completion("c", 0.2))
    assert paired(tools) == ([("a", "c")], {LeftOut.OWN_PROMPT: 1})


def test_exports_join_a_prefilled_answer_into_one_message() -> None:
    messages = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "<think>"}]
    begun = group(completion("2</think>", 1.0), completion("3</think>", 0.5), messages=messages)
    assert taken(begun)[0] == ["<think>2</think>"]
    assert paired(begun)[0] == [("<think>2</think>", "<think>3</think>")]


@pytest.mark.slow
async def test_exports_load_with_datasets_in_the_form_of_trl(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    from datasets import load_dataset
    from trl.data_utils import is_conversational

    saved = save(tmp_path / "groups.jsonl", [MIXED, group(completion("a", 0.0), completion("b", 0.0), row=1)])
    await sft(LAUNCH, SftOptions(saved=saved, out=tmp_path / "sft.jsonl"), console)
    await dpo(LAUNCH, DpoOptions(saved=saved, out=tmp_path / "dpo.jsonl", min_difference=0.5), console)
    load = {"split": "train", "cache_dir": str(tmp_path / "cache")}
    rows = load_dataset("json", data_files=str(tmp_path / "sft.jsonl"), **load)
    assert rows.column_names == ["messages"]
    assert is_conversational(rows[0])
    user = {"role": "user", "content": "1 + 1?"}
    assert rows[0]["messages"] == [user, {"role": "assistant", "content": "best"}]
    rows = load_dataset("json", data_files=str(tmp_path / "dpo.jsonl"), **load)
    assert is_conversational(rows[0])
    assert rows.to_list() == [
        {
            "prompt": [user],
            "chosen": [{"role": "assistant", "content": "best"}],
            "rejected": [{"role": "assistant", "content": "worst"}],
            "score_chosen": 1.0,
            "score_rejected": -1.0,
        }
    ]
    text = shown(console)
    assert f"1 rows: {tmp_path / 'sft.jsonl'}" in text
    assert f"1 rows: {tmp_path / 'dpo.jsonl'}" in text
    assert f"1 {LeftOut.NO_SCORE}" in text
    assert f"1 {LeftOut.NO_PAIR}" in text


async def test_exports_overwrite_no_file_and_leave_no_empty_file(tmp_path: Path, console: Console) -> None:
    saved = save(tmp_path / "groups.jsonl", [MIXED])
    before = saved.read_bytes()
    with raises(SavedError, "output_is_input", path=saved):
        await sft(LAUNCH, SftOptions(saved=saved, out=saved), console)
    left_out = {"no_score": 1, "twice": 1, "cut": 1, "low": 4}
    with raises(SavedError, "nothing_to_export", path=saved, left_out=left_out):
        await sft(LAUNCH, SftOptions(saved=saved, out=tmp_path / "sft.jsonl", min_score=7), console)
    assert saved.read_bytes() == before
    assert names_in(tmp_path) == ["groups.jsonl"]
    (tmp_path / "sft.jsonl").write_text("mine")
    with raises(SavedError, "output_exists", path=tmp_path / "sft.jsonl"):
        await sft(LAUNCH, SftOptions(saved=saved, out=tmp_path / "sft.jsonl"), console)
    assert (tmp_path / "sft.jsonl").read_text() == "mine"


async def test_groups_of_text_and_of_messages_do_not_mix_in_a_file(tmp_path: Path, console: Console) -> None:
    text = group(completion("2", 1.0), completion("3", 0.0), messages=None, prompt_text="<|user|>1 + 1?", row=1)
    saved = save(tmp_path / "text.jsonl", [text])
    await sft(LAUNCH, SftOptions(saved=saved, out=tmp_path / "sft.jsonl"), console)
    assert json.loads((tmp_path / "sft.jsonl").read_text()) == {"prompt": "<|user|>1 + 1?", "completion": "2"}
    await dpo(LAUNCH, DpoOptions(saved=saved, out=tmp_path / "dpo.jsonl"), console)
    assert json.loads((tmp_path / "dpo.jsonl").read_text())["rejected"] == "3"
    with raises(SavedError, "groups_mixed", path=saved):
        await sft(LAUNCH, SftOptions(saved=save(saved, [MIXED]), out=tmp_path / "both.jsonl"), console)
    assert not (tmp_path / "both.jsonl").exists()
