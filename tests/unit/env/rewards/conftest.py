"""The pool of symbolic checks, for tests that count what reaches it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gristmill_env.answers.symbolic_pool import SymbolicPool, symbolic_pool
from gristmill_env.rewards import accuracy


@pytest.fixture
def untouched_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[SymbolicPool]:
    """A pool of the test's own in place of the shared pool, which the test must not change."""
    pool = SymbolicPool()
    monkeypatch.setattr(accuracy, "symbolic_pool", lambda: pool)
    yield pool
    pool.close()


@pytest.fixture(scope="session", autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    symbolic_pool().close()
