"""The user's function for `on_step` is loaded from a file or a package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.errors import raises

from gristmill.errors import PluginError
from gristmill_trainer.hooks import load_function


def test_hook_loads_a_function_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def seen(event):\n    return ('seen', event)\n")
    assert load_function(f"{tmp_path}/mine.py:seen", "on_step")(7) == ("seen", 7)


def test_hook_is_found_beside_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside.py").write_text("def seen(event):\n    return event\n")
    monkeypatch.setenv("GRISTMILL_CONFIG_DIR", str(tmp_path))
    assert load_function("beside.py:seen", "on_step")(7) == 7


def test_hook_loads_a_function_of_a_package() -> None:
    assert load_function("json:dumps", "on_step") is __import__("json").dumps


@pytest.mark.parametrize(
    ("name", "code", "values"),
    [
        ("seen", "plugin_name", {"name": "seen"}),
        ("/nowhere/mine.py:seen", "plugin_file_missing", {"candidates": [Path("/nowhere/mine.py")]}),
        ("no_such_package:seen", "plugin_module_missing", {"module": "no_such_package"}),
        ("json:no_such_function", "plugin_attribute_missing", {"place": "json", "attribute": "no_such_function"}),
        ("json:__name__", "not_a_function", {"name": "json:__name__"}),
    ],
)
def test_hook_that_does_not_exist_is_named(name: str, code: str, values: dict[str, Any]) -> None:
    with raises(PluginError, code, **values):
        load_function(name, "on_step")
    assert "mine" not in sys.modules
