"""`environment:` what a row is the beginning of."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from gristmill.settings import Settings


class EnvironmentSpec(Settings):
    """Which environment a run's rows are acted out in. A bare name stands for {type: name}."""

    type: str = "dataset"
    """Registered name, or a class of your own: path/to/file.py:Class, package.module:Class."""

    params: dict[str, Any] = Field(default_factory=dict)
    """Options of the environment, e.g. {tries: 3}."""

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: Any) -> Any:
        return {"type": value} if isinstance(value, str) else value
