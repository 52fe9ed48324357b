"""Evaluated prompts, made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gristmill import SamplingParams
from gristmill.internal.saved import SavedCompletion, SavedGroup
from gristmill_env.evaluation.plan import Plan

PLAN = Plan(
    task="sums", model="tiny", weights="1.20", dataset="data set 'sums.jsonl' (split test)", rows=4, prompts=4,
    samples=2, sampling=SamplingParams(temperature=1.0, max_tokens=8), max_length=64, decides="accuracy", compares=True,
    settings={"dataset_path": "sums.jsonl", "split": "test", "reward_functions": []},
)  # fmt: skip


def plan(**changes: Any) -> Plan:
    return msgspec.structs.replace(PLAN, **changes)


def sample(accuracy: float | None, *, error: str | None = None, length: float = 0.5, **changes: Any) -> SavedCompletion:
    fields: dict[str, Any] = {
        "text": "#### 1",
        "tokens": 4,
        "finish_reason": "stop",
        "extracted": "1",
        "right": None if accuracy is None else accuracy >= 1,
        "total": None if accuracy is None or error else accuracy + length,
        "scores": {"accuracy": accuracy, "length": length},
        "error": error,
        "versions": ["1.20"],
    }
    return SavedCompletion(**(fields | changes))


def prompt(number: int, completions: Sequence[SavedCompletion], max_tokens: int = 8, **changes: Any) -> SavedGroup:
    fields: dict[str, Any] = {
        "run": "sums",
        "row": number,
        "index": number,
        "prompt": f"What is {number} + 1?",
        "prompt_text": f"What is {number} + 1?",
        "answer": str(number + 1),
        "prompt_tokens": 10,
        "sampling": SamplingParams(temperature=1.0, max_tokens=max_tokens),
        "completions": list(completions),
    }
    return SavedGroup(**(fields | changes))


def judged(number: int, *scores: float | None) -> SavedGroup:
    """A prompt whose completions have these accuracies."""
    return prompt(number, [sample(score) for score in scores])
