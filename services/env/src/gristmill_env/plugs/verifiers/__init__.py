"""Single-turn environments of `verifiers`: their data set becomes rows, their rubric a reward.

dataset:
  dataset_name: verifiers:gsm8k       # the id for vf.load_environment
  dataset_args: {num_train_examples: 500}
  reward_functions: [verifiers]
"""

from gristmill_env.plugs.verifiers.environment import environment_rows, load_environment
from gristmill_env.plugs.verifiers.reward import RubricReward, rubric_reward

__all__ = ["RubricReward", "environment_rows", "load_environment", "rubric_reward"]
