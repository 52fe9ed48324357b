"""The report of an evaluation: self-contained, complete, and safe whatever text a model wrote."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from gristmill.internal.saved import SavedGroup
from gristmill_env.evaluation.report import PAGE_FILE, write_evaluation_page
from gristmill_env.evaluation.results import Evaluated, summarise

from ..commands.test_page import HOSTILE, Page
from .made import PLAN, judged, prompt, sample


def page_of(folder: Path, records: list[SavedGroup]) -> Page:
    evaluated = Evaluated(PLAN, summarise(PLAN, records), folder, started=100.0, ended=107.5, resumed=0)
    assert write_evaluation_page(evaluated, records) == folder / PAGE_FILE
    return Page((folder / PAGE_FILE).read_text(encoding="utf-8"))


def test_page_shows_figures_with_intervals_and_every_completion(tmp_path: Path) -> None:
    page = page_of(tmp_path, [judged(0, 1, 1), judged(1, 1, 0), prompt(2, [sample(0), sample(0)])])
    assert page.balanced
    assert "pass@1" in page.texts["th"]
    assert "50 %" in page.texts["b"]
    assert page.texts["i"] == ["2 / 2", "1 / 2", "0 / 2"]
    assert [text for text in page.texts["b"] if text in ("right", "wrong")] == ["right", "right", "wrong", "wrong"]
    assert page.texts["span"].count("× 2") == 2, "equal completions appear once"


def test_page_shows_why_a_prompt_was_not_asked(tmp_path: Path) -> None:
    page = page_of(tmp_path, [judged(0, 1, 1), prompt(1, [], reason="too_long", error="10 tokens of 8")])
    assert page.balanced
    assert "too_long: 10 tokens of 8" in page.texts["p"]


def test_page_of_no_prompts_is_valid(tmp_path: Path) -> None:
    assert page_of(tmp_path, []).balanced


@pytest.mark.slow
@pytest.mark.parametrize("text", HOSTILE)
def test_page_shows_hostile_text_without_executing_it(text: str, tmp_path: Path) -> None:
    def records(words: str) -> list[SavedGroup]:
        kept = prompt(0, [msgspec.structs.replace(sample(1), text=words, extracted=words, error=words)])
        return [msgspec.structs.replace(kept, prompt_text=words, answer=words)]

    hostile, harmless = page_of(tmp_path, records(text)), page_of(tmp_path, records("words"))
    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in harmless.tags]
    assert [attrs.keys() for _, attrs in hostile.tags] == [attrs.keys() for _, attrs in harmless.tags]
    assert hostile.text.count(text) >= 4
