"""Real containers on a real engine. A machine without an engine fails these tests; `make e2e` prepares the machine."""

from __future__ import annotations

import pytest
from tests.support.compose import build_images


@pytest.fixture(scope="session", autouse=True)
def images() -> None:
    build_images()
