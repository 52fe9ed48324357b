"""From rewards to advantages."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gristmill.settings import Settings


class AdvantageSettings(Settings):
    """How rewards become advantages. Advantages that the environment sends are used as they are."""

    advantage_scale: Literal["group", "batch", "none"] = "group"
    """What a reward's distance from its group's mean is divided by: the group's standard deviation (GRPO), that of all
    rewards of the step, or nothing (Dr. GRPO)."""
    overlong: Literal["keep", "filter"] = "keep"
    """filter: a completion that was cut off at max_tokens is not trained on (DAPO)."""
    overlong_buffer: int | None = Field(default=None, ge=1)
    """Soft punishment of length (DAPO): within this many tokens of the completion's limit the reward falls, by
    overlong_penalty at the limit."""
    overlong_penalty: float = Field(default=1.0, ge=0)
    """Reward taken away at the limit, see overlong_buffer."""
