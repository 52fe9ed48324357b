"""Which reward of a run says whether a completion is right: one rule, for evaluations and for the metrics of training.

1. The first that reads answers itself: accuracy, exact_match, mcq, or one of the user's that says what is stated.
2. Where there is none, the first that asks for the row's answer.
3. Where there is none either, the first of all. It says how good a completion is, not whether it is right.

"First" is in the order of the configuration. Of a composed reward its parts are looked at, not their sum, whose scale
its weights make: `r1/accuracy` decides, not `r1`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gristmill_env.rewards.reward import Reward

FULL = 1 - 1e-9
"""Values from here on are full ones: 1, but for rounding."""


@dataclass(frozen=True)
class Decision:
    """The deciding reward."""

    name: str
    """In Score.parts: "r1/accuracy" of a composed one."""
    reward: Reward
    compares: bool
    """Whether it compares the completion with the row's answer, so that there is a right one, and one to vote for."""

    def is_right(self, value: float | None) -> bool | None:
        """By its value, before its weight; None where it said nothing, or failed."""
        return None if value is None else value >= FULL


def deciding_reward(rewards: Sequence[Reward]) -> Decision:
    """The one of a run's rewards (at least one) that decides."""
    leaves = {name: leaf for reward in rewards for name, leaf in reward.leaves().items()}
    for name, leaf in leaves.items():
        if leaf.reads_answers:
            return Decision(name, leaf, compares=True)
    for name, leaf in leaves.items():
        if leaf.compares:
            return Decision(name, leaf, compares=True)
    return Decision(rewards[0].name, rewards[0], compares=False)
