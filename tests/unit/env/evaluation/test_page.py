"""The report of an evaluation: self-contained, complete, and safe whatever text a model wrote."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from gristmill_env.evaluation.page import PAGE_FILE, write_evaluation_page
from gristmill_env.evaluation.results import Evaluated, summarise
from gristmill_env.evaluation.samples import SAMPLES_FILE, PromptRecord

from ..commands.test_page import HOSTILE, Page
from .made import PLAN, judged, prompt, sample


def page_of(folder: Path, records: list[PromptRecord]) -> Page:
    (folder / SAMPLES_FILE).write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    evaluated = Evaluated(PLAN, summarise(PLAN, records), folder, started=100.0, ended=107.5, resumed=0)
    assert write_evaluation_page(evaluated) == folder / PAGE_FILE
    return Page((folder / PAGE_FILE).read_text(encoding="utf-8"))


def test_page_shows_figures_with_intervals_and_every_completion(tmp_path: Path) -> None:
    page = page_of(tmp_path, [judged(0, 1, 1), judged(1, 1, 0), prompt(2, [sample(0), sample(0)])])
    assert page.balanced
    assert "pass@1" in page.texts["th"]
    assert "50 %" in page.texts["b"]
    assert page.texts["i"] == ["2 / 2", "1 / 2", "0 / 2"]
    assert page.count("article") == 6


def test_page_of_no_prompts_is_valid(tmp_path: Path) -> None:
    assert page_of(tmp_path, []).balanced


@pytest.mark.slow
@pytest.mark.parametrize("text", HOSTILE)
def test_page_shows_hostile_text_without_executing_it(text: str, tmp_path: Path) -> None:
    def records(words: str) -> list[PromptRecord]:
        kept = prompt(0, [msgspec.structs.replace(sample(1), text=words, answer=words, error=words)])
        return [msgspec.structs.replace(kept, prompt=words, answer=words)]

    hostile, harmless = page_of(tmp_path, records(text)), page_of(tmp_path, records("words"))
    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in harmless.tags]
    assert [attrs.keys() for _, attrs in hostile.tags] == [attrs.keys() for _, attrs in harmless.tags]
    assert hostile.text.count(text) >= 4
