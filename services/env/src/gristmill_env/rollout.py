"""One item, end to end: its attempts, and what they scored."""

from __future__ import annotations

from dataclasses import dataclass

from gristmill import SamplingParams
from gristmill_env.data import Item
from gristmill_env.prompts import Prompt
from gristmill_env.rewards import Score
from gristmill_env.transcript import Attempt


@dataclass(frozen=True)
class Rollout:
    """The attempts at one item and what they scored, in the same order."""

    item: Item
    sampling: SamplingParams
    attempts: list[Attempt]
    scores: list[Score]
    seconds: float
    """From the first request to the last score."""

    @property
    def prompt(self) -> Prompt:
        """What the first attempt began with; that of the others is the same where the environment keeps its word."""
        return self.attempts[0].prompt
