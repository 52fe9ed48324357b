"""The library example of docs/trainer.md trains."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from tests.support.groups import make_group

DOCS = Path(__file__).resolve().parents[3] / "docs" / "trainer.md"


def test_documented_library_example_trains(model_dir: Path) -> None:
    code = re.search(r"## As a library.*?```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert code is not None
    groups = [make_group("g00000001", lengths=[(3, 4), (3, 6)]), make_group("g00000002", lengths=[(5, 4), (5, 2)])]
    names: dict[str, Any] = {"model": str(model_dir), "groups": groups}
    exec(code.group(1), names)
    assert math.isfinite(names["result"].loss)
    assert names["result"].trained_tokens == 16
    assert not names["prepared"].rejected
