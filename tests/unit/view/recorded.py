"""Values of a recorded quickstart run: metrics, log lines, records of the API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gristmill import Environment, RunRecord, RunStatus

REWARDS = (0.225, 0.3234, 0.4031, 0.4016, 0.2953, 0.4563, 0.4063, 0.5203)
"""reward_mean of the first steps."""
LOGS = {
    "redis": "--- started 2026-11-23 05:48:28, process 19369\n"
    "19369:M 23 Nov 2026 05:48:28.212 * Ready to accept connections tcp\n",
    "api": "--- started 2026-11-23 05:48:28, process 19376\n"
    "INFO:     Application startup complete.\n"
    "05:48:29 api     WARNING refused request='GET /v1/runs/quickstart' code=run_missing why=\"there is no run\"\n",
    "model": "--- started 2026-11-23 05:48:29, process 19385\n"
    "05:48:35 model   INFO    resolved model=tiny revision=196bdf1cb67c path=/m/tiny-196bdf1cb67c\n"
    "(APIServer pid=19385) WARNING 11-23 05:48:43 [cpu.py:224] Triton is not installed.\n"
    "Loading safetensors checkpoint shards:   0% Completed | 0/2 [00:00<?, ?it/s]\n"
    "Loading safetensors checkpoint shards: 100% Completed | 2/2 [00:00<00:00, 325.95it/s]\n",
    "env": "--- started 2026-11-23 05:48:56, process 19471\n"
    "05:48:57 env     INFO    data set 'datasets/quickstart/train.jsonl' (split train): 800 rows; rewards: format\n"
    "05:49:01 env     INFO    run quickstart is open at version none yet: waiting for a trainer\n"
    "05:49:05 env     WARNING 44 of the last 48 groups were dropped as same_scores: raise temperature\n",
    "trainer": "--- started 2026-11-23 05:48:56, process 19469\n"
    "05:49:02 trainer INFO    model /m/tiny: 0.6M parameters, 0.6M of them trained, on cpu\n"
    "05:49:02 trainer INFO    took run quickstart: incarnation 1, step 0 of 60\n"
    "05:49:03 trainer INFO    step 1/60  reward 0.225  loss +0.0292  grad_norm 0.839  logprob_diff 2.5e-07  "
    "version 1.1  seconds: wait 0.41 pack 0.01 train 0.32\n",
}


def rows(count: int = 8, **changes: Any) -> list[dict[str, Any]]:
    """Returns the metrics of the first steps; `changes` replace values in each of them."""
    return [
        {
            "step": number,
            "policy_version": f"1.{number}",
            "reward_mean": REWARDS[(number - 1) % len(REWARDS)],
            "reward_parts": {"format": 0.25 + number / 16, "accuracy": 0.2},
            "rollout_logprob_diff_mean": 2.5e-7,
            "tokens": 2200,
            "staleness": {"0": 16},
            "staleness_mean": 0.0,
            "zero_advantage_share": 0.0,
            "seconds": {"wait": 0.5, "pack": 0.1, "train": 0.4, "publish": 0.1},
            **changes,
        }
        for number in range(1, count + 1)
    ]


def record(**changes: Any) -> RunRecord:
    """Returns the record of the open run after step 8 of 60."""
    return RunRecord.model_validate(
        {
            "run_id": "quickstart", "state": "open", "digest": "d", "group_size": 8, "stack": "default",
            "env": {"model": "tiny", "dataset": {"temperature": 1.0}, "trainer": {"learning_rate": 1e-4}},
            "trainer": {"publisher": "filesystem"}, "incarnation": 1, "version": "1.8", "groups_per_step": 16,
            "training_steps": 60, "max_staleness": 0, "created_at": 1795412941.0, **changes,
        }
    )  # fmt: skip


def status(**changes: Any) -> RunStatus:
    """Returns the counts of a run whose environment works on the groups of the next step."""
    return RunStatus.model_validate(
        {
            "state": "open", "version": "1.8", "ready": 4, "leased": 0, "trained": 128, "dead": 0, "sequences": {},
            "bytes_by_state": {}, "accepted": 132, "outstanding": 12, "dropped": {}, "rows_issued": 144, "bytes": 1,
            "envs": 1, "oldest_ready_s": 0.4, "last_submit_s": 0.2, "last_asked_s": 0.6, **changes,
        }
    )  # fmt: skip


def environment(alive: bool = True) -> Environment:
    return Environment(env_id="vm-19471", alive=alive)


def write_run(folder: Path, metrics: list[dict[str, Any]], logs: Mapping[str, str] = LOGS) -> Path:
    """Writes the files of a run as the trainer and the launcher do. Returns the folder."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    for name, text in logs.items():
        (folder / "logs" / f"{name}.log").write_text(text)
    if metrics:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    return folder
