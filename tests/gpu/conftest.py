"""Tests that need a CUDA card. They need torch, transformers, numpy, pydantic, msgspec and pytest, and no service."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def card() -> None:
    """Skips the test without a card."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA card here")
