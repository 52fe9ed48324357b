"""No service runs code that comes with a model: each loader of `transformers` gets an explicit option against it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
_LOADERS = frozenset({"from_pretrained", "SentenceTransformer"})


def _loads(path: Path) -> list[ast.Call]:
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [call for call in calls if getattr(call.func, "attr", getattr(call.func, "id", None)) in _LOADERS]


def _sources() -> list[Path]:
    folders = ("sdk/src/**", "view/src/**", "cli/src/**", "services/*/src/**", "scripts")
    found = [path for folder in folders for path in ROOT.glob(f"{folder}/*.py")]
    return [path for path in found if _loads(path)]


@pytest.mark.parametrize("path", _sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_loaders_do_not_trust_remote_code(path: Path) -> None:
    for call in _loads(path):
        told = {keyword.arg: getattr(keyword.value, "value", None) for keyword in call.keywords}
        assert told.get("trust_remote_code") is False, f"line {call.lineno}"


def test_sources_cover_all_services_that_load_models() -> None:
    assert {path.relative_to(ROOT).parts[1] for path in _sources()} >= {"env", "model", "trainer"}
