"""Every test file and support tool that tests/README.md names exists, and it names every tool."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
README = TESTS / "README.md"


def test_readme_names_test_files_that_exist() -> None:
    named = set(re.findall(r"`([\w/]*test_\w+\.py)`", README.read_text()))
    assert len(named) >= 40
    # A name without a folder is in integration/api, or next to the tool that the paragraph describes.
    folders = (TESTS, TESTS / "integration" / "api", TESTS / "mutation")
    assert not [name for name in named if not any((folder / name).is_file() for folder in folders)]


def test_readme_names_every_support_tool() -> None:
    table = README.read_text().partition("## Tools in `support/`")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(\w+\.py)`", table)) == {path.name for path in (TESTS / "support").glob("*.py")}
