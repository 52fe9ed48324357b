"""One entry of `reward_functions`."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gristmill.settings import Settings


class RewardSpec(Settings):
    """One reward of a run, with its weight and options."""

    type: str
    """Registered name (accuracy, format, length), path/to/file.py:function, package.module:function, or a TRL reward
    function: trl:package.module:function. verifiers is the rubric of the environment in dataset_name: verifiers:ID."""

    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    """What it is called in scores and metrics; unset, its own name. Tells two uses of one reward apart."""

    weight: float = Field(default=1.0, allow_inf_nan=False)
    """Factor in the total. 0 keeps the reward as a metric only."""

    params: dict[str, Any] = Field(default_factory=dict)
    """Options of the reward, e.g. {target_tokens: 64}."""
