"""One entry of `reward_functions`."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gristmill.settings import Settings


class RewardSpec(Settings):
    """One reward of a run, with its weight and options."""

    type: str
    """Registered name: accuracy, format, length."""

    weight: float = 1.0
    """Factor in the total. 0 keeps the reward as a metric only."""

    params: dict[str, Any] = Field(default_factory=dict)
    """Options of the reward, e.g. {target_tokens: 64}."""
