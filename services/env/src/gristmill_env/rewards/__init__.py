"""Rewards: the registry, the built-in rewards, and the scorer that computes their weighted sum.

A `Reward` (modules `registry`, `create`, `reward`, `inputs`) is a definition with its options and inputs. The `Scorer`
(modules `scorer`, `calls`) calls it, in this process or in a child process, and repeats calls. Both have `Outcomes` as
the result.

As a library::

    reward = create_reward({"type": "accuracy"})
    reward.score(["... \\\\boxed{72}"], answer="#### 72")  # [1.0]
"""

# Importing a module registers its rewards.
from gristmill_env.rewards import accuracy, builtin, code, composed, embeddings, judge, mcq  # noqa: F401
from gristmill_env.rewards.calls import Execution
from gristmill_env.rewards.create import create_reward
from gristmill_env.rewards.inputs import Sample
from gristmill_env.rewards.outcomes import Failure, RewardResult
from gristmill_env.rewards.registry import reward, reward_names
from gristmill_env.rewards.reward import Reward
from gristmill_env.rewards.scorer import CorrectnessReward, Score, Scorer, WeightedReward, correctness_reward

__all__ = [
    "CorrectnessReward",
    "Execution",
    "Failure",
    "Reward",
    "RewardResult",
    "Sample",
    "Score",
    "Scorer",
    "WeightedReward",
    "correctness_reward",
    "create_reward",
    "reward",
    "reward_names",
]
