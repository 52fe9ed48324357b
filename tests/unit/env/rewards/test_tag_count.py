"""tag_count: an equal part for every tag that occurs once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.scoring import scored

TAGS: list[tuple[dict[str, Any], str, float]] = [
    ({}, "<think>20 + 5</think><answer>25</answer>", 1.0),
    ({}, "<think>\n20 + 5\n</think>\n<answer>\n25\n</answer>", 1.0),
    ({}, "<think>20 + 5</think> 25", 0.5),
    ({}, "<answer>25</answer>", 0.5),
    ({}, "<think>20 + 5</think><answer>25", 0.75),
    ({}, "<think>20 + 5", 0.25),
    ({}, "", 0.0),
    ({}, "25", 0.0),
    ({}, "<think>20</think><think>5</think><answer>25</answer>", 0.5),
    ({}, "<answer>25</answer>" * 9, 0.0),
    ({"preferred_tags": ["answer"]}, "<answer>25</answer>", 1.0),
    ({"preferred_tags": ["answer"]}, "<think>5</think>", 0.0),
    ({"preferred_tags": ["a", "b", "c"]}, "<a>1</a><b>", 0.5),
]


@pytest.mark.parametrize(("params", "completion", "score"), TAGS)
def test_tag_count(params: dict[str, Any], completion: str, score: float) -> None:
    assert scored("tag_count", params, completion) == score


_PIECES = st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "25", " "]), max_size=12)


@given(pieces=_PIECES)
def test_tag_count_is_a_multiple_of_a_quarter(pieces: list[str]) -> None:
    assert scored("tag_count", completion="".join(pieces)) in (0.0, 0.25, 0.5, 0.75, 1.0)


@given(pieces=_PIECES)
def test_tag_count_gives_nothing_for_repeated_tags(pieces: list[str]) -> None:
    assert scored("tag_count", completion="".join(pieces * 2)) == 0.0
