"""One entry of `reward_functions`."""

from __future__ import annotations

from typing import Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from gristmill.settings import Settings

_NOT_RECORDED = frozenset({"api_key", "base_url"})


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

    @model_serializer(mode="wrap")
    def _without_an_unset_name(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A run's record is the same as before there were names."""
        return {key: value for key, value in write(self).items() if key != "name" or value is not None}

    def recorded(self) -> dict[str, Any]:
        """What makes it this reward and no other. Keys and addresses are no part of that: they may change."""
        return {**self.model_dump(mode="json"), "params": _public(self.params)}


def _public(value: Any) -> Any:
    """Without keys and addresses, those of rewards inside of rewards included."""
    if isinstance(value, dict):
        return {key: _public(item) for key, item in value.items() if key not in _NOT_RECORDED}
    return [_public(item) for item in value] if isinstance(value, list) else value
