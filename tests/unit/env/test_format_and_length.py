"""The format and length rewards."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill_env.rewards import Sample, create_reward

FORMAT: list[tuple[dict[str, Any], str, float]] = [
    ({}, "<answer>25</answer>", 1.0),
    ({}, "<think>20 + 5</think> 25", 1.0),
    ({}, "<think>20 + 5</think><answer>25</answer>", 1.0),
    ({}, "25", 0.0),
    ({}, "", 0.0),
    ({}, "<answer>25", 0.0),
    ({}, "25</answer>", 0.0),
    ({}, "</answer>25<answer>", 0.0),
    ({}, "<answer> </answer>", 0.0),
    ({}, "<answer>25</think>", 0.0),
    ({"require_all_tags": True}, "<answer>25</answer>", 0.0),
    ({"require_all_tags": True}, "<think>20 + 5</think><answer>25</answer>", 1.0),
    ({"preferred_tags": ["solution"]}, "<solution>25</solution>", 1.0),
    ({"preferred_tags": ["solution"]}, "<answer>25</answer>", 0.0),
    ({"strict": True}, "<think>20 + 5</think> 25", 1.0),
    ({"strict": True}, "\n<think>20 + 5</think><answer>25</answer>", 1.0),
    ({"strict": True}, "Well. <think>20 + 5</think> 25", 0.0),
    ({"strict": True}, "<think>20</think><think>5</think> 25", 0.0),
    ({"strict": True}, "<think>20 + 5</think>", 0.0),
    ({"strict": True}, "<answer>25</answer>", 0.0),
]


@pytest.mark.parametrize(("params", "completion", "score"), FORMAT)
def test_format(params: dict[str, Any], completion: str, score: float) -> None:
    assert create_reward("format", params).score(Sample(completion)) == score


@pytest.mark.parametrize(("tokens", "score"), [(0, 0.0), (1, 0.25), (2, 0.5), (4, 1.0), (400, 1.0)])
def test_length_rises_to_its_target(tokens: int, score: float) -> None:
    assert create_reward("length", {"target_tokens": 4}).score(Sample("", tokens=[7] * tokens)) == score
