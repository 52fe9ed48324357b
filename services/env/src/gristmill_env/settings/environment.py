"""`environment:` what a row is the beginning of."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from gristmill.settings import Settings
from gristmill_env.settings.rewards import without_secrets


class EnvironmentSpec(Settings):
    """The environment that defines the task. A bare name means {type: name}."""

    type: str = "dataset"
    """Registered name, or your own class: path/to/file.py:Class, package.module:Class."""

    params: dict[str, Any] = Field(default_factory=dict)
    """Options of the environment, e.g. {tries: 3}. Secrets (api_key) are not recorded."""

    step_timeout: float = Field(default=600.0, gt=0)
    """Seconds that one call of a method (reset, step, close) may take. Then the group is dropped."""

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: Any) -> Any:
        return {"type": value} if isinstance(value, str) else value

    def recorded(self) -> dict[str, Any]:
        """What makes it this environment and no other. Secrets are left out."""
        return {"type": self.type, "params": without_secrets(self.model_dump(mode="json")["params"])}
