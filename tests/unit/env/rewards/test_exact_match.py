"""Exact match: the same text, except for differences that do not count."""

from __future__ import annotations

import pytest

from gristmill_env.rewards.builtin import exact_match


@pytest.mark.parametrize(
    ("completion", "gold"),
    [
        ("The answer is Paris.", "Paris"),
        ("the answer is paris", "PARIS"),
        ("#### New   York", "new york"),
        ("<answer>\nNew\nYork\n</answer>", "New York"),
        (r"\boxed{\text{Paris}}", "Paris"),
        ("The answer is **Paris**!", "Paris."),
        ("Paris", "Paris"),
        ("<think>Rome?</think> Paris.", "#### Paris"),
        ("STRASSE", "Straße"),
        ("#### 東京", "東京"),
    ],
)
def test_the_same_text_scores_one(completion: str, gold: str) -> None:
    assert exact_match(completion, gold) == 1.0


@pytest.mark.parametrize(
    ("completion", "gold"),
    [
        ("The answer is Paris.", "Rome"),
        ("The answer is Paris, France.", "Paris"),
        ("It is Paris", "Paris"),
        ("Paris. The answer is Rome.", "Paris"),
        ("<think>Paris</think>", "Paris"),
        ("", "Paris"),
        ("#### 72.0", "72"),
        ("#### well-known", "well known"),
        ("#### NewYork", "New York"),
    ],
)
def test_another_text_scores_zero(completion: str, gold: str) -> None:
    assert exact_match(completion, gold) == 0.0


def test_options() -> None:
    assert exact_match("#### paris", "Paris", ignore_case=False) == 0.0
    assert exact_match("#### Paris", "Paris", ignore_case=False) == 1.0
    assert exact_match("#### It's (nearly) done", "its nearly done", ignore_punctuation=True) == 1.0
    assert exact_match("#### It's (nearly) done", "its nearly done") == 0.0
    assert exact_match("Paris", "Paris", whole_if_unmarked=False) == 0.0
    assert exact_match("#### Paris", "Paris", whole_if_unmarked=False) == 1.0


@pytest.mark.parametrize("gold", ["", "  ", "...", "#### "])
def test_an_empty_gold_gives_no_score(gold: str) -> None:
    assert exact_match("Paris", gold) is None
