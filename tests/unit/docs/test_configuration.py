"""The generated tables in docs/ are current, and every error has a code for its table."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import configuration_docs
import error_codes


@pytest.mark.slow
def test_configuration_tables_are_current() -> None:
    stale = [path.name for path in configuration_docs.stale_files()]
    assert not stale, "run python scripts/configuration_docs.py"


@pytest.mark.slow
def test_outdated_configuration_table_is_found(tmp_path: Path) -> None:
    for name in configuration_docs.FILES:
        shutil.copy(configuration_docs.DOCS / name, tmp_path)
    path = tmp_path / "configuration.md"
    path.write_text(path.read_text().replace("`--group_size`", "`--size`"))
    assert [stale.name for stale in configuration_docs.stale_files(tmp_path)] == ["configuration.md"]


@pytest.mark.slow
def test_every_cause_of_a_failed_receipt_has_a_row() -> None:
    from gristmill_trainer.receipts.diagnosis import REMEDIES  # imports torch

    text = (configuration_docs.DOCS / "reproduce.md").read_text()
    assert [cause for cause in REMEDIES if text.count(f"\n| `{cause}` |") != 1] == []


def test_every_setting_has_a_description() -> None:
    text = (configuration_docs.DOCS / "configuration.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) > 50
    assert not [row for row in rows if row.endswith("|  |")]


@pytest.mark.slow
def test_every_error_has_a_literal_code() -> None:
    """The table and the readers of logs need a snake_case word at the place that raises the error."""
    found = error_codes.collect()
    assert len(found) > 300
    assert not [error for error in found if not error.code]
    assert {error.package for error in found} == set(error_codes.PACKAGES)
    kinds = {error.kind for error in found}
    assert {"TrainerError", "InflatedTooLarge", "PydanticCustomError"} <= kinds, "each way to make an error is found"
