"""Every test that docs/reliability.md names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
GUARANTEES = ROOT / "docs" / "reliability.md"


def test_guarantees_name_tests_that_exist() -> None:
    named = set(re.findall(r"\b(test_\w+)(?!\w*\.py)", GUARANTEES.read_text())) - {"test_this"}
    sources = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    existing = {name for source in sources for name in re.findall(r"def (test_\w+)", source)}
    # A name that is too long for a line of prose ends with dots.
    missing = {name for name in named if not any(known.startswith(name) for known in existing)}
    assert not missing
    assert len(named) >= 40
    files = set(re.findall(r"test_\w+\.py", GUARANTEES.read_text()))
    assert not files - {path.name for path in (ROOT / "tests").rglob("test_*.py")}
