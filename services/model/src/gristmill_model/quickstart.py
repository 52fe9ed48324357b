"""The quickstart's data: sums of a number below 100 and a digit, in GSM8K's `question`/`answer` schema.

`python -m gristmill_model.quickstart configs/datasets/quickstart` writes the two files that ship with the stack. The
warm start of `tiny` uses the train rows only. The 200 test rows are sums that neither the warm start nor RL has seen.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path

TEST_ROWS = 200
SPLIT_SEED = 20


@dataclass(frozen=True)
class Sum:
    """One row: the sum of `a` (0 to 99) and `b` (0 to 9)."""

    a: int
    b: int

    @property
    def total(self) -> int:
        return self.a + self.b

    @property
    def question(self) -> str:
        return f"What is {self.a} + {self.b}?"

    @property
    def answer(self) -> str:
        return f"{self.a} + {self.b} = {self.total}\n#### {self.total}"


def split() -> tuple[list[Sum], list[Sum]]:
    """Returns the 800 train rows and the 200 test rows: disjoint, always the same and in the same order."""
    rows = [Sum(a, b) for a in range(100) for b in range(10)]
    random.Random(SPLIT_SEED).shuffle(rows)
    return rows[TEST_ROWS:], rows[:TEST_ROWS]


def jsonl(rows: list[Sum]) -> str:
    """Returns the rows as lines of JSON, each with `question` and `answer`."""
    return "".join(json.dumps({"question": row.question, "answer": row.answer}) + "\n" for row in rows)


def write(folder: Path) -> None:
    """Writes `train.jsonl` and `test.jsonl` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(("train", "test"), split(), strict=True):
        (folder / f"{name}.jsonl").write_text(jsonl(rows), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the quickstart's train and test rows.")
    parser.add_argument("folder", type=Path, help="where to write, for example configs/datasets/quickstart")
    write(parser.parse_args().folder)
