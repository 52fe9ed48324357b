"""A data set of sums from reasoning-gym, which a real model sometimes solves."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

ROWS = 2000
WHAT = "sums and differences of two numbers with up to two digits"
TEXT = (
    "Questions and answers are reasoning-gym's `chain_sum` (2 terms, 1 to 2 digits, seed 1), 2000 rows. The reward is "
    "1 when the completion's last number is right. 8 prompts × 8 completions a step, synchronous "
    "`dapo`, AdamW at a rate that falls evenly from 1e-5 to 0."
)
CONFIG = Path(__file__).parents[2] / "configs" / "sums_smollm2.yaml"


def write(folder: Path) -> Path:
    """Writes the data set and its configuration into `folder`. Returns the configuration's path."""
    import reasoning_gym

    rows = reasoning_gym.create_dataset(
        "chain_sum", size=ROWS, seed=1, min_terms=2, max_terms=2, min_digits=1, max_digits=2
    )
    lines = (json.dumps({"question": row["question"], "answer": row["answer"]}) + "\n" for row in rows)
    (folder / "sums.jsonl").write_text("".join(lines))
    path = folder / "sums.yaml"
    settings = yaml.safe_load(CONFIG.read_text())
    settings["dataset"] |= {"dataset_path": "sums.jsonl", "eval_dataset_path": None, "eval_limit": None}
    path.write_text(yaml.safe_dump(settings))
    return path
