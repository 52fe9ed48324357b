"""Evaluated prompts, made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gristmill import SamplingParams
from gristmill_env.evaluation.plan import Plan
from gristmill_env.evaluation.samples import PromptRecord, SampleRecord

PLAN = Plan(
    task="sums", model="tiny", weights="1.20", dataset="data set 'sums.jsonl' (split test)", rows=4, prompts=4,
    samples=2, sampling=SamplingParams(temperature=1.0, max_tokens=8), max_length=64, decides="accuracy", compares=True,
    settings={"dataset_path": "sums.jsonl", "split": "test", "reward_functions": []},
)  # fmt: skip


def plan(**changes: Any) -> Plan:
    return msgspec.structs.replace(PLAN, **changes)


def sample(accuracy: float | None, *, error: str | None = None, length: float = 0.5, **changes: Any) -> SampleRecord:
    fields: dict[str, Any] = {
        "text": "#### 1",
        "tokens": 4,
        "finish_reason": "stop",
        "answer": "1",
        "right": None if accuracy is None else accuracy >= 1,
        "total": None if accuracy is None or error else accuracy + length,
        "parts": {"accuracy": accuracy, "length": length},
        "error": error,
        "versions": ["1.20"],
    }
    return SampleRecord(**(fields | changes))


def prompt(number: int, samples: Sequence[SampleRecord], **changes: Any) -> PromptRecord:
    fields: dict[str, Any] = {
        "number": number,
        "index": number,
        "prompt": f"What is {number} + 1?",
        "answer": str(number + 1),
        "prompt_tokens": 10,
        "max_tokens": 8,
        "samples": list(samples),
    }
    return PromptRecord(**(fields | changes))


def judged(number: int, *scores: float | None) -> PromptRecord:
    """A prompt whose completions have these accuracies."""
    return prompt(number, [sample(score) for score in scores])
