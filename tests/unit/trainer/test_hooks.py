"""`on_step`: a function of the user's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gristmill_trainer.errors import TrainerError
from gristmill_trainer.hooks import load_hook


def test_a_function_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def seen(event):\n    return ('seen', event)\n")
    assert load_hook(f"{tmp_path}/mine.py:seen")(7) == ("seen", 7)  # type: ignore[arg-type]


def test_a_function_of_a_package() -> None:
    assert load_hook("json:dumps") is __import__("json").dumps


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("seen", "write path/to/file.py:function"),
        ("/nowhere/mine.py:seen", "there is no file /nowhere/mine.py"),
        ("no_such_package:seen", "No module named 'no_such_package'"),
        ("json:no_such_function", "json has no function 'no_such_function'"),
    ],
)
def test_what_is_not_there_is_named(name: str, told: str) -> None:
    with pytest.raises(TrainerError, match=told):
        load_hook(name)
    assert "mine" not in sys.modules
