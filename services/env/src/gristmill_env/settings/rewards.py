"""One entry of `reward_functions`."""

from __future__ import annotations

from typing import Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from gristmill.redaction import is_secret
from gristmill.settings import Settings


class RewardSpec(Settings):
    """One reward of a run, with its weight and options."""

    type: str
    """Registered name (accuracy, format, length), path/to/file.py:function, package.module:function, or a TRL reward
    function: trl:package.module:function. verifiers is the rubric of the environment in dataset_name: verifiers:ID."""

    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    """Name in scores and metrics. Default: its own name. Distinguishes two uses of one reward."""

    weight: float = Field(default=1.0, allow_inf_nan=False)
    """Factor in the total. 0 keeps the reward as a metric only."""

    params: dict[str, Any] = Field(default_factory=dict)
    """Options of the reward, e.g. {target_tokens: 64}."""

    process: bool = False
    """Call the reward in reward_processes separate processes. A process is killed if a call overruns, even in C code.
    Each process imports the reward again, and processes share no memory."""

    @model_serializer(mode="wrap")
    def _without_what_is_unset(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A run's record is the same as before there were names and processes."""
        return {key: value for key, value in write(self).items() if key not in ("name", "process") or value}

    def recorded(self) -> dict[str, Any]:
        """What makes it this reward and no other, without secrets, addresses and where it runs: they may change."""
        kept = self.model_dump(mode="json", exclude={"process"})
        return {**kept, "params": without_secrets(self.params, "base_url")}


def without_secrets(value: Any, *others: str) -> Any:
    """A copy without the keys that name a secret, and without the keys `others`, at any depth."""
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if key not in others and not is_secret(str(key))}
        return {key: without_secrets(item, *others) for key, item in kept.items()}
    return [without_secrets(item, *others) for item in value] if isinstance(value, list) else value
