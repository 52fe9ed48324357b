"""Greedy exact match on the quickstart's held-out questions."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

TEST_ROWS = Path(__file__).resolve().parents[2] / "configs" / "datasets" / "quickstart" / "test.jsonl"
_ANSWER = re.compile(r"<answer>\s*(-?\d+)\s*</answer>")


def questions() -> list[tuple[str, str]]:
    """Returns (question, gold answer) of every held-out row."""
    rows = [json.loads(text) for text in TEST_ROWS.read_text().splitlines()]
    return [(row["question"], row["answer"].split("####")[1].strip()) for row in rows]


def exact_match(model_url: str) -> float:
    """Returns the share of held-out questions that the running model server answers right, greedily, in <answer>
    tags."""
    with httpx.Client(base_url=model_url, timeout=120) as http, ThreadPoolExecutor(16) as pool:
        name = http.get("/v1/models").json()["data"][0]["id"]

        def right(row: tuple[str, str]) -> bool:
            question, gold = row
            body = {
                "model": name,
                "messages": [{"role": "user", "content": question}],
                "max_tokens": 24,
                "temperature": 0.0,
            }
            answer = http.post("/v1/chat/completions", json=body).raise_for_status()
            found = _ANSWER.search(answer.json()["choices"][0]["message"]["content"])
            return found is not None and found[1] == gold

        rows = questions()
        return sum(pool.map(right, rows)) / len(rows)
