"""docs/api.md lists every error code of the trajectory API with its HTTP status."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "services" / "api" / "src"
BOUNDS = {("too_many_runs", "409"), ("too_many_envs", "409"), ("too_many_sources", "409")}
"""The codes that `errors.too_many` forms."""


def raised() -> set[tuple[str, str]]:
    """Returns code and status of each ApiProblem in the source."""
    calls = [
        node
        for path in SOURCES.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "ApiProblem"
    ]
    codes = {(ast.literal_eval(call.args[0]), ast.unparse(call.args[1])) for call in calls if _is_text(call.args[0])}
    assert len(codes) > 30
    return codes | BOUNDS


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_guide_lists_every_error_code_with_its_status() -> None:
    section = (ROOT / "docs" / "api.md").read_text().split("\n## Error codes\n")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `(\w+)` \| (\d+) \|", section, re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(listed) == raised()
