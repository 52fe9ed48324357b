"""docs/api.md and the SDK's ErrorCode list every error code of the trajectory API."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from gristmill import ErrorCode

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "services" / "api" / "src"
BOUND_STATUS = "409"
"""The status of the codes too_many_<what>, which `errors.too_many(what, ...)` makes."""


def raised() -> set[tuple[str, str]]:
    """Returns code and status of each ApiProblem in the source."""
    calls: dict[str, list[ast.Call]] = {"ApiProblem": [], "too_many": []}
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
            if name in calls and isinstance(node, ast.Call) and _is_text(node.args[0]):
                calls[name].append(node)
    codes = {(ast.literal_eval(call.args[0]), ast.unparse(call.args[1])) for call in calls["ApiProblem"]}
    bounds = {(f"too_many_{ast.literal_eval(call.args[0])}", BOUND_STATUS) for call in calls["too_many"]}
    assert len(codes) > 30
    assert bounds
    return codes | bounds


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


@pytest.mark.slow
def test_guide_lists_every_error_code_with_its_status() -> None:
    section = (ROOT / "docs" / "api.md").read_text().split("\n## Error codes\n")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `(\w+)` \| (\d+) \|", section, re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(listed) == raised()


@pytest.mark.slow
def test_sdk_has_every_error_code_and_one_for_answers_without_a_code() -> None:
    assert {code.value for code in ErrorCode} == {code for code, _ in raised()} | {ErrorCode.UNEXPECTED}
    assert [code.name.lower() for code in ErrorCode] == [code.value for code in ErrorCode]


def test_every_error_code_of_the_sdk_has_a_docstring() -> None:
    (kind,) = ast.parse(inspect.getsource(ErrorCode)).body
    assert isinstance(kind, ast.ClassDef)
    assert [type(node) for node in kind.body[1:]] == [ast.Assign, ast.Expr] * len(ErrorCode)
