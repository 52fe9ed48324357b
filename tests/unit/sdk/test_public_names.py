"""The public names of `gristmill`, which are imported when they are used, and the modules that this saves."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gristmill

HEAVY = ("datasets", "httpx", "numpy", "torch", "transformers", "yaml")


def test_type_checkers_and_processes_see_the_same_names() -> None:
    tree = ast.parse(Path(gristmill.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 0]
    for_types = {f"{node.module}.{alias.asname}" for node in imports for alias in node.names if alias.asname}
    assert for_types == {f"gristmill.{module}.{name}" for name, module in gristmill._MODULES.items()}


def test_every_public_name_is_in_its_module() -> None:
    assert all(getattr(gristmill, name) is not None for name in gristmill.__all__)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Nothing"):
        gristmill.Nothing  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "needs"),
    [
        ("gristmill_env.running.host", ()),
        ("gristmill_env.environments.child", ("yaml",)),
        ("gristmill_env.rewards.calls", ("yaml",)),
    ],
)
def test_processes_of_users_code_import_no_large_packages(module: str, needs: tuple[str, ...]) -> None:
    """A run starts one such process for each kind of code, and again after each hang."""
    program = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ast.literal_eval(done.stdout) == list(needs)


@pytest.mark.slow
@pytest.mark.parametrize("module", ["gristmill_view", "gristmill_view.report", "gristmill_cli.main"])
def test_view_and_program_import_tables_and_servers_when_they_need_them(module: str) -> None:
    large = ("duckdb", "pyarrow", "starlette", "tokenizers", "torch", "uvicorn")
    program = f"import sys, {module}; print([name for name in {large} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ast.literal_eval(done.stdout) == []
