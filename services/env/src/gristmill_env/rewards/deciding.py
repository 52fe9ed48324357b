"""Selects the reward that decides whether a completion is right, for evaluations and for training metrics.

1. The first reward that extracts answers: accuracy, exact_match, mcq, or a user's reward with `states`.
2. If no reward extracts answers, the first reward that asks for the row's answer.
3. If no reward asks for the answer, the first reward. It measures the quality of a completion, not its correctness.

"First" refers to the order in the configuration. For a composed reward its parts are considered, not their sum, because
the weights determine the scale of the sum: `r1/accuracy` decides, not `r1`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gristmill_env.rewards.reward import Reward

FULL = 1 - 1e-9
"""Values from here on count as 1, to allow for rounding errors."""


@dataclass(frozen=True)
class Decision:
    """The reward that decides whether a completion is right."""

    name: str
    """The name in Score.parts, for example "r1/accuracy" for a part of a composed reward."""
    reward: Reward
    compares: bool
    """Whether the reward compares the completion with the row's answer, so that completions can be right and can
    vote."""

    def is_right(self, value: float | None) -> bool | None:
        """Decides from the unweighted value; None if the reward returned None or failed."""
        return None if value is None else value >= FULL


def deciding_reward(rewards: Sequence[Reward]) -> Decision:
    """Returns the deciding reward. `rewards`: a run's rewards, at least one."""
    leaves = {name: leaf for reward in rewards for name, leaf in reward.leaves().items()}
    for name, leaf in leaves.items():
        if leaf.reads_answers:
            return Decision(name, leaf, compares=True)
    for name, leaf in leaves.items():
        if leaf.compares:
            return Decision(name, leaf, compares=True)
    return Decision(rewards[0].name, rewards[0], compares=False)
