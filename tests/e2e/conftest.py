"""Real containers on a real engine. A machine without one is a failure, not a skip: `make e2e` prepares it."""

from __future__ import annotations

import pytest
from tests.support.compose import build_images


@pytest.fixture(scope="session", autouse=True)
def images() -> None:
    build_images()
