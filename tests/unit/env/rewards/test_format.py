"""The format reward: which shapes are right, and which are wrong."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.errors import raises
from tests.support.scoring import scored

from gristmill_env.errors import RewardError

FORMAT: list[tuple[dict[str, Any], str, float]] = [
    ({}, "<answer>25</answer>", 1.0),
    ({}, "<think>20 + 5</think> 25", 1.0),
    ({}, "<think>20 + 5</think><answer>25</answer>", 1.0),
    ({}, "<answer></answer> no, <answer>25</answer>", 1.0),
    ({}, "<answer>\n25\n</answer>", 1.0),
    ({}, "25", 0.0),
    ({}, "", 0.0),
    ({}, "<answer>25", 0.0),
    ({}, "25</answer>", 0.0),
    ({}, "</answer>25<answer>", 0.0),
    ({}, "<answer> </answer>", 0.0),
    ({}, "<answer></answer><answer></answer>", 0.0),  # text between two empty pairs is not inside a pair
    ({}, "<answer>25 <answer></answer>", 0.0),  # the innermost pair, as accuracy reads it
    ({}, "<answer>25</think>", 0.0),
    ({}, "<answers>25</answers>", 0.0),
    ({"require_all_tags": True}, "<answer>25</answer>", 0.0),
    ({"require_all_tags": True}, "<think>20 + 5</think><answer>25</answer>", 1.0),
    ({"preferred_tags": ["solution"]}, "<solution>25</solution>", 1.0),
    ({"preferred_tags": ["solution"]}, "<answer>25</answer>", 0.0),
    ({}, "<Answer>25</ANSWER>", 1.0),
    ({"preferred_tags": ["Answer"]}, "<answer>25</answer>", 1.0),
    ({"case_sensitive": True}, "<Answer>25</Answer>", 0.0),
    ({"case_sensitive": True}, "<answer>25</answer>", 1.0),
    ({"case_sensitive": True, "preferred_tags": ["Answer"]}, "<Answer>25</Answer>", 1.0),
    ({"case_sensitive": True, "preferred_tags": ["Answer"]}, "<answer>25</answer>", 0.0),
    ({"strict": True}, "<think>20 + 5</think> 25", 1.0),
    ({"strict": True}, "<THINK>20 + 5</THINK> 25", 1.0),
    ({"strict": True, "case_sensitive": True}, "<THINK>20 + 5</THINK> 25", 0.0),
    ({"strict": True}, "\n<think>20 + 5</think><answer>25</answer>", 1.0),
    ({"strict": True}, "Well. <think>20 + 5</think> 25", 0.0),
    ({"strict": True}, "<think>20</think><think>5</think> 25", 0.0),
    ({"strict": True}, "<think>20 + 5</think>", 0.0),
    ({"strict": True}, "<answer>25</answer>", 0.0),
]


@pytest.mark.parametrize(("params", "completion", "score"), FORMAT)
def test_format(params: dict[str, Any], completion: str, score: float) -> None:
    assert scored("format", params, completion) == score


def test_a_list_of_no_tags_is_refused() -> None:
    with raises(RewardError, "parameter_invalid", parameter="preferred_tags", problem="too_short"):
        scored("format", {"preferred_tags": []}, "<answer>25</answer>")
