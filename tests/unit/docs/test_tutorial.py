"""The program of docs/tutorial.md writes the rows that configs/sums_smollm2.yaml trains on."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_program_of_the_tutorial_writes_the_shipped_rows(tmp_path: Path) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "tutorial.md").read_text(), re.M | re.S)
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    folder = Path("configs", "datasets", "sums")
    for name, rows in (("train.jsonl", 2000), ("test.jsonl", 200)):
        written = (tmp_path / folder / name).read_text()
        assert written == (ROOT / folder / name).read_text()
        assert len(written.splitlines()) == rows
