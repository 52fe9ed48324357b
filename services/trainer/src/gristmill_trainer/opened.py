"""What the environment told of itself when it opened the run. Clients other than ours may tell anything there."""

from __future__ import annotations

from typing import Any

from gristmill import ConfigError, Protocol, RunRecord


def trainer_block(run: RunRecord) -> dict[str, Any]:
    """The run's settings of the trainer. Raises ConfigError for what cannot be such."""
    found = run.env.get("trainer") or {}
    if not isinstance(found, dict):
        raise ConfigError(
            f"run {run.run_id} was opened with trainer: {found!r}, which is no mapping of settings to values; close "
            "it, and open another"
        )
    return found


def longest_completion(run: RunRecord) -> int | None:
    """The environment's `max_tokens`; Atropos' environments do not tell theirs."""
    found = _dataset(run).get("max_tokens")
    return found if isinstance(found, int) else None


def dataset_name(run: RunRecord) -> str:
    """For the card of the model."""
    dataset = _dataset(run)
    found = dataset.get("dataset_name") or dataset.get("dataset_path")
    return str(found or ("environments of Atropos'" if run.protocol is Protocol.ATROPOS else "not told"))


def reward_names(run: RunRecord) -> list[str]:
    """Of the run's reward functions, in order."""
    found = _dataset(run).get("reward_functions")
    told = found if isinstance(found, list) else []
    return [str(one.get("type") if isinstance(one, dict) else one) for one in told]


def _dataset(run: RunRecord) -> dict[str, Any]:
    found = run.env.get("dataset")
    return found if isinstance(found, dict) else {}
