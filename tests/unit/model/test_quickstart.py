"""The quickstart's rows: the shipped rows equal the module's rows, and the test rows are held out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gristmill_model.quickstart import jsonl, split

SHIPPED = Path(__file__).parents[3] / "configs" / "datasets" / "quickstart"


@pytest.mark.parametrize(("name", "place"), [("train", 0), ("test", 1)])
def test_shipped_files_are_the_modules(name: str, place: int) -> None:
    assert (SHIPPED / f"{name}.jsonl").read_text() == jsonl(split()[place])


def test_test_rows_and_train_rows_are_disjoint() -> None:
    train, test = split()
    assert len(test) == 200
    assert not {row.question for row in train} & {row.question for row in test}


def test_rows_have_gsm8ks_schema_and_are_right() -> None:
    for row in (row for rows in split() for row in rows):
        assert row.answer.endswith(f"\n#### {row.a + row.b}")
    first = json.loads(jsonl(split()[0]).splitlines()[0])
    assert list(first) == ["question", "answer"]
