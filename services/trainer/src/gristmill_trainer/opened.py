"""Reads the settings that an environment recorded when it opened the run. Other clients may record anything there."""

from __future__ import annotations

from typing import Any

from gristmill import Protocol, RunRecord
from gristmill.hyperparameters import check_run_block


def trainer_block(run: RunRecord) -> dict[str, Any]:
    """Returns the hyperparameters that the run sets. Raises ConfigError for other settings (`check_run_block`)."""
    block: dict[str, Any] = run.env.get("trainer") or {}
    check_run_block(block, run.group_size, f"run {run.run_id}: trainer")
    return block


def longest_completion(run: RunRecord) -> int | None:
    """Returns the environment's `max_tokens`; None if unknown, as for Atropos environments."""
    found = _dataset(run).get("max_tokens")
    return found if isinstance(found, int) else None


def dataset_name(run: RunRecord) -> str:
    """Returns the dataset's name for the card of the model."""
    dataset = _dataset(run)
    found = dataset.get("dataset_name") or dataset.get("dataset_path")
    return str(found or ("environments of Atropos'" if run.protocol is Protocol.ATROPOS else "not told"))


def reward_names(run: RunRecord) -> list[str]:
    """Returns the names of the run's reward functions, in order."""
    found = _dataset(run).get("reward_functions")
    told = found if isinstance(found, list) else []
    return [str(one.get("type") if isinstance(one, dict) else one) for one in told]


def _dataset(run: RunRecord) -> dict[str, Any]:
    found = run.env.get("dataset")
    return found if isinstance(found, dict) else {}
