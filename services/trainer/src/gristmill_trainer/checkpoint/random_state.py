"""The random number generators of this process, as tensors and numbers that torch.save takes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Let all of them begin at `seed`, whichever process they are in."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """Python's, numpy's, torch's on the CPU and on every CUDA device."""
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
    """Put all back. CUDA devices beyond those that there were keep their seeds."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    numbers = state["numpy"]
    key = numbers["key"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, numbers["pos"], numbers["has_gauss"], numbers["gauss"]))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for device, generator in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(generator, device)
