"""The model that both sides of the comparison load."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.trl_oracle import save_model


@pytest.fixture(scope="session")
def oracle_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("oracle"))
