"""`on_step`: a function of the user's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gristmill.errors import PluginError
from gristmill_trainer.hooks import load_hook


def test_a_function_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def seen(event):\n    return ('seen', event)\n")
    assert load_hook(f"{tmp_path}/mine.py:seen")(7) == ("seen", 7)  # type: ignore[arg-type]


def test_a_function_of_a_package() -> None:
    assert load_hook("json:dumps") is __import__("json").dumps


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("seen", "'seen' names no code; write path/to/file.py:name"),
        ("/nowhere/mine.py:seen", "/nowhere/mine.py is not there"),
        ("no_such_package:seen", "there is no no_such_package"),
        ("json:no_such_function", "json has no 'no_such_function'"),
        ("json:__name__", "which is no function"),
    ],
)
def test_what_is_not_there_is_named(name: str, told: str) -> None:
    with pytest.raises(PluginError, match=told):
        load_hook(name)
    assert "mine" not in sys.modules
