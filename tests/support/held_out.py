"""Greedy exact match on the quickstart's held-out questions."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx

TEST_ROWS = Path(__file__).resolve().parents[2] / "configs" / "datasets" / "quickstart" / "test.jsonl"
_ANSWER = re.compile(r"<answer>\s*(-?\d+)\s*</answer>")


def questions() -> list[tuple[str, str]]:
    """(question, gold answer) of every held-out row."""
    rows = [json.loads(text) for text in TEST_ROWS.read_text().splitlines()]
    return [(row["question"], row["answer"].split("####")[1].strip()) for row in rows]


def exact_match(model_url: str) -> float:
    """Share of the held-out questions that the running model server answers right, greedily, in <answer> tags."""
    rows = questions()
    right = 0
    with httpx.Client(base_url=model_url, timeout=120) as http:
        name = http.get("/v1/models").json()["data"][0]["id"]
        for question, gold in rows:
            body = {
                "model": name,
                "messages": [{"role": "user", "content": question}],
                "max_tokens": 24,
                "temperature": 0.0,
            }
            answer = http.post("/v1/chat/completions", json=body)
            answer.raise_for_status()
            found = _ANSWER.search(answer.json()["choices"][0]["message"]["content"])
            right += found is not None and found[1] == gold
    return right / len(rows)
