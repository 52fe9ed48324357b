"""What a tracker is told."""

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
    """The completions of one prompt and what they scored."""

    scores: Sequence[Score]
    lengths: Sequence[int]
    """Tokens sampled, of those completions where the server tells."""
    finish_reasons: Sequence[str]
    seconds: float
    """From the first request to the last score."""
    step: int
    """Training steps of the weights that it was asked of."""

    @classmethod
    def of(cls, rollout: Rollout, version: PolicyVersion) -> ScoredPrompt:
        """What trackers want to know of a rollout."""
        return cls(
            scores=rollout.scores,
            lengths=[attempt.sampled for attempt in rollout.attempts if attempt.sampled is not None],
            finish_reasons=[attempt.finish_reason for attempt in rollout.attempts],
            seconds=rollout.seconds,
            step=version.step,
        )


class Tracker(Protocol):
    """Told of every prompt that was scored, of every group that was submitted, and of every evaluation."""

    def scored(self, prompt: ScoredPrompt) -> None:
        """A prompt was scored, whatever becomes of it: groups of one score are dropped, but they count."""

    def group(self, group: TrajectoryGroup, texts: Sequence[str], tally: Tally) -> None:
        """A group was submitted. `texts`: prompt and completion in words, one a sequence of the group."""

    def evaluation(self, results: Mapping[str, float], step: int) -> None:
        """The weights of training step `step` were evaluated. `results`: by name, without a prefix."""

    def close(self) -> None:
        """Flush."""
