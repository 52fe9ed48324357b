"""The hub's offline cache with a small data set in GSM8K's schema under GSM8K's name."""

from __future__ import annotations

import random
from pathlib import Path

from datasets import Dataset, load_dataset

ROWS = 64
_CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
---
"""


def make_gsm8k_cache(home: Path, scratch: Path) -> None:
    """Fills `home` (an HF_HOME) so that load_dataset("openai/gsm8k", "main") works with HF_HUB_OFFLINE=1."""
    source = scratch / "gsm8k"
    (source / "main").mkdir(parents=True)
    rng = random.Random(0)
    pairs = [(rng.randrange(100), rng.randrange(10)) for _ in range(ROWS)]
    rows = [{"question": f"What is {a} + {b}?", "answer": f"{a} + {b} = {a + b}\n#### {a + b}"} for a, b in pairs]
    for split in ("train", "test"):
        Dataset.from_list(rows).to_parquet(str(source / "main" / f"{split}-00000-of-00001.parquet"))
    (source / "README.md").write_text(_CARD)
    cache = home / "datasets"
    load_dataset(str(source), "main", cache_dir=str(cache))
    # The name that a download from the hub would have had.
    (cache / "gsm8k").rename(cache / "openai___gsm8k")
    for path in (home, *home.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)  # The container's user is not this user.
