"""Minimal saved groups, and commands run as a user runs them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gristmill_env.saved import GroupWriter, SavedCompletion, SavedGroup


def completion(text: str, total: float | None, **fields: Any) -> SavedCompletion:
    if "token_ids" in fields:
        fields["tokens"] = len(fields["token_ids"])
    return SavedCompletion(text=text, total=total, finish_reason=fields.pop("finish_reason", "stop"), **fields)


def group(*completions: SavedCompletion, row: int = 0, **fields: Any) -> SavedGroup:
    kept: dict[str, Any] = {"run": "sums", "row": row, "index": row, "prompt": "1 + 1?", "answer": "#### 2"}
    kept["messages"] = [{"role": "user", "content": "1 + 1?"}]
    return SavedGroup(completions=list(completions), **(kept | fields))


def save(path: Path, groups: Sequence[SavedGroup]) -> Path:
    with GroupWriter(path) as writer:
        for one in groups:
            writer.append(one)
    return path


@pytest.fixture
def console() -> Console:
    """`console.file.getvalue()` returns the output of a command."""
    return Console(file=io.StringIO(), width=200, highlight=False)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
