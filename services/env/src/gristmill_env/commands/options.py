"""The commands' own flags."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from gristmill.settings import Settings


class ProcessOptions(Settings):
    """Flags of `process`."""

    groups: int = Field(default=20, ge=1)
    """Rows to process, from the first of the run's order on; a group each."""

    out: Path | None = None
    """Where to: a .jsonl file, or a folder for groups.jsonl. The page lies beside it, as .html. What is in the file
    already is kept and not made again. Unset: runs/<run id>/groups.jsonl."""


class CloseOptions(Settings):
    """Flags of `close`."""

    run: str
    """Id of the run to end."""


class ReplayOptions(Settings):
    """Flags of `replay`."""

    saved: Path
    """Groups to score again: a file of process or serve, one of Atropos, or a run's folder (runs/quickstart)."""

    out: Path | None = None
    """Where the groups with their new scores go, as .jsonl. Unset: nowhere, the comparison is only shown."""


class SftOptions(Settings):
    """Flags of `sft`."""

    saved: Path
    """Groups to take from: a file of process or serve, one of Atropos, or a run's folder (runs/quickstart)."""

    out: Path
    """File to write, .jsonl."""

    top_n: int = Field(default=1, ge=1)
    """Most completions to take of a group, the best first."""

    min_score: float | None = None
    """Completions that score less are left out. Unset: those that score 0 or less."""


class DpoOptions(Settings):
    """Flags of `dpo`."""

    saved: Path
    """Groups to take from: a file of process or serve, one of Atropos, or a run's folder (runs/quickstart)."""

    out: Path
    """File to write, .jsonl."""

    min_difference: float = Field(default=0.0, ge=0)
    """Pairs whose scores differ by less are left out; so are ties, always."""

    pairs: int = Field(default=1, ge=1)
    """Most pairs to take of a group, those that differ most first."""
