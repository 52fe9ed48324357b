"""A data set of sums from reasoning-gym, which a real model sometimes solves."""

from __future__ import annotations

import json
from pathlib import Path

ROWS = 2000
WHAT = "sums and differences of two numbers with up to two digits"
TEXT = (
    "Questions and answers are reasoning-gym's `chain_sum` (2 terms, 1 to 2 digits, seed 1), 2000 rows. The reward is "
    "1 when the completion's last number is right. 8 prompts × 8 completions a step, synchronous "
    "`dapo`, AdamW at a rate that falls evenly from 1e-5 to 0."
)
_CONFIG = """
group_size: 8
max_num_workers: 8
max_token_length: 128
ensure_scores_are_not_same: false
dataset:
  dataset_path: sums.jsonl
  prompt_field: question
  answer_field: answer
  system_prompt: Answer with a number.
  max_tokens: 24
  temperature: 1.0
  reward_functions: [{type: accuracy, params: {last_number: true}}]
trainer:
  training_steps: 45
  batch_size: 16
  gradient_accumulation_steps: 4
  learning_rate: 1.0e-5
  lr_schedule: linear
  checkpoint_interval: 15
"""


def write(folder: Path) -> Path:
    """Writes the data set and its configuration into `folder`. Returns the configuration's path."""
    import reasoning_gym

    rows = reasoning_gym.create_dataset(
        "chain_sum", size=ROWS, seed=1, min_terms=2, max_terms=2, min_digits=1, max_digits=2
    )
    lines = (json.dumps({"question": row["question"], "answer": row["answer"]}) + "\n" for row in rows)
    (folder / "sums.jsonl").write_text("".join(lines))
    path = folder / "sums.yaml"
    path.write_text(_CONFIG.lstrip())
    return path
