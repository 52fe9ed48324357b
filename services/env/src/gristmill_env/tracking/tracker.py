"""The interface of trackers, and their input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gristmill import PolicyVersion, TrajectoryGroup
from gristmill_env.rewards import Score
from gristmill_env.rollout import Rollout
from gristmill_env.tally import Tally


@dataclass(frozen=True)
class ScoredPrompt:
    """The completions of one prompt and their scores."""

    scores: Sequence[Score]
    lengths: Sequence[int]
    """Tokens sampled, for the completions whose server reports the number."""
    finish_reasons: Sequence[str]
    seconds: float
    """From the first request to the last score."""
    step: int
    """Training steps of the newest weights when the prompt's permit was granted."""

    @classmethod
    def of(cls, rollout: Rollout, version: PolicyVersion) -> ScoredPrompt:
        """Extracts a tracker's input from a rollout."""
        return cls(
            scores=rollout.scores,
            lengths=[attempt.sampled for attempt in rollout.attempts if attempt.sampled is not None],
            finish_reasons=[attempt.finish_reason for attempt in rollout.attempts],
            seconds=rollout.seconds,
            step=version.step,
        )


class Tracker(Protocol):
    """Receives every scored prompt, every submitted group and every evaluation."""

    def scored(self, prompt: ScoredPrompt) -> None:
        """Records a scored prompt, also if its group is dropped, for example because all scores are the same."""

    def group(self, group: TrajectoryGroup, texts: Sequence[str], tally: Tally) -> None:
        """Records a submitted group. `texts`: prompt and completion as text, one per sequence of the group."""

    def evaluation(self, results: Mapping[str, float], step: int) -> None:
        """Records an evaluation of training step `step`. `results`: by name, without a prefix."""

    def close(self) -> None:
        """Flushes."""
