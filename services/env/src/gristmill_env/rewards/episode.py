"""The reward that the environment returns."""

from __future__ import annotations

from gristmill_env.rewards.registry import reward


@reward("episode")
def episode(episode_reward: float | None) -> float | None:
    """What the run's `environment` gave for the attempt (the sum over its turns); None where it gave nothing."""
    return episode_reward
