"""The random number generators of this process, as tensors and numbers for torch.save."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seeds all generators with `seed`, the same in every process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """Returns the states of Python, numpy and torch, on the CPU and on every CUDA device."""
    version, words, gauss = random.getstate()
    numbers = np.random.get_state(legacy=False)
    twister = numbers["state"]
    return {
        "python": [version, list(words), gauss],
        "numpy": {
            "key": torch.from_numpy(twister["key"].astype(np.int64)),
            "pos": int(twister["pos"]),
            "has_gauss": int(numbers["has_gauss"]),
            "gauss": float(numbers["gauss"]),
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Restores all states. CUDA devices without a saved state keep their seeds."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    numbers = state["numpy"]
    key = numbers["key"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, numbers["pos"], numbers["has_gauss"], numbers["gauss"]))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for device, generator in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(generator, device)
