"""`make quick` leaves out the marker `slow`, and a test without the marker must be fast.

`make unit` runs `make quick` first and then the slow tests, so that no fast test waits for the import of torch.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest

MOST_CPU_SECONDS = 10.0
"""Longest processor time of a test without the marker, with its child processes: several times what `slow` means,
because processor time grows on a busy machine too, and the first use of a package fills its caches."""
MOST_IMPORTS = 100
"""A test that imports more modules is the first of its process that needs a package, and may take longer."""
QUICK, SLOW = "not long and not slow", "not long and slow"
"""The two parts of `make unit`, as arguments of pytest's -m."""
WITH_TORCH = ("benchmarks", "model", "trainer")
"""Folders whose tests are all slow, because their imports take seconds."""
_WHOLE_FILE = re.compile(r"^pytestmark = pytest\.mark\.slow$", re.MULTILINE)


def pytest_configure(config: pytest.Config) -> None:
    """Hides torch from `make quick`, whose import takes seconds: transformers then works as in the image of `env`."""
    if config.option.markexpr == QUICK:
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves files out by their text, because imports take most of the time of `make quick`.

    `make quick` imports no file whose tests are all slow, and the slow part of `make unit` no file without the marker.
    """
    chosen = config.option.markexpr
    if chosen not in (QUICK, SLOW):
        return None
    with_torch = _folder(collection_path) in WITH_TORCH
    if collection_path.is_dir() or with_torch:
        return True if with_torch and chosen == QUICK else None
    if collection_path.suffix != ".py":
        return None
    text = collection_path.read_text()
    return True if (_WHOLE_FILE.search(text) if chosen == QUICK else "pytest.mark.slow" not in text) else None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks every test of the folders with torch."""
    if _folder(item.path) in WITH_TORCH:
        item.add_marker(pytest.mark.slow)


def _folder(path: Path) -> str:
    return path.relative_to(Path(__file__).parent).parts[0] if path != Path(__file__).parent else ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fails a test that took long and is not marked."""
    began, before, modules = time.monotonic(), os.times(), len(sys.modules)
    result = yield
    after = os.times()
    children = after.children_user + after.children_system - before.children_user - before.children_system
    # Children count when they end, and an earlier test may have started them.
    children = min(children, time.monotonic() - began)
    taken = after.user + after.system - before.user - before.system + children
    exempt = len(sys.modules) - modules > MOST_IMPORTS
    if taken > MOST_CPU_SECONDS and not exempt and not any(map(item.get_closest_marker, ("slow", "long"))):
        pytest.fail(f"took {taken:.1f} s of processor time: mark it with pytest.mark.slow, or make it faster")
    return result
