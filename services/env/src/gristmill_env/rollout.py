"""The result for one item: its attempts and their scores."""

from __future__ import annotations

from dataclasses import dataclass

from gristmill import SamplingParams
from gristmill_env.data import Item
from gristmill_env.prompts import Prompt
from gristmill_env.rewards import Score
from gristmill_env.transcript import Attempt


@dataclass(frozen=True)
class Rollout:
    """The attempts at one item and their scores, in the same order."""

    item: Item
    sampling: SamplingParams
    attempts: list[Attempt]
    scores: list[Score]
    seconds: float
    """From the first request to the last score."""

    @property
    def prompt(self) -> Prompt:
        """The first attempt's prompt; the others have the same prompt if the environment gives them the same task."""
        return self.attempts[0].prompt
