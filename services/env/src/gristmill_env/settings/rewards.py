"""One entry of `reward_functions`."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gristmill.settings import Settings

_NOT_RECORDED = frozenset({"api_key", "base_url"})


class RewardSpec(Settings):
    """One reward of a run, with its weight and options."""

    type: str
    """Registered name: accuracy, format, length."""

    weight: float = 1.0
    """Factor in the total. 0 keeps the reward as a metric only."""

    params: dict[str, Any] = Field(default_factory=dict)
    """Options of the reward, e.g. {target_tokens: 64}."""

    def recorded(self) -> dict[str, Any]:
        """What makes it this reward and no other. Keys and addresses are no part of that: they may change."""
        params = {key: value for key, value in self.params.items() if key not in _NOT_RECORDED}
        return {**self.model_dump(mode="json"), "params": params}
