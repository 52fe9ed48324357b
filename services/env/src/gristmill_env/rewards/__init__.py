"""Rewards: the registry, the built-in rewards, and the scorer that computes their weighted sum.

As a library::

    reward = create_reward({"type": "accuracy"})
    reward.score(["... \\\\boxed{72}"], answer="#### 72")  # [1.0]
"""

# Importing a module registers its reward.
import gristmill_env.rewards.accuracy
import gristmill_env.rewards.cosine_length
import gristmill_env.rewards.cosine_scaled
import gristmill_env.rewards.episode
import gristmill_env.rewards.exact_match
import gristmill_env.rewards.format
import gristmill_env.rewards.length
import gristmill_env.rewards.mcq
import gristmill_env.rewards.reasoning_steps
import gristmill_env.rewards.repetition_penalty
import gristmill_env.rewards.soft_overlong
import gristmill_env.rewards.tag_count  # noqa: F401
from gristmill_env.rewards.create import create_reward
from gristmill_env.rewards.deciding import Decision, deciding_reward
from gristmill_env.rewards.inputs import Execution
from gristmill_env.rewards.registry import reward, reward_names
from gristmill_env.rewards.reward import Reward
from gristmill_env.rewards.sample import Detailed, Failure, Sample, Score
from gristmill_env.rewards.scorer import Scorer, WeightedReward

__all__ = [
    "Decision",
    "Detailed",
    "Execution",
    "Failure",
    "Reward",
    "Sample",
    "Score",
    "Scorer",
    "WeightedReward",
    "create_reward",
    "deciding_reward",
    "reward",
    "reward_names",
]
