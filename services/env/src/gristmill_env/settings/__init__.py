"""Everything that can be set in a run's YAML or on the command line of the environment.

The key names are those that users of Atropos know. Each field's text is also its `--help`.
"""

from gristmill_env.settings.dataset import VERIFIERS, DatasetConfig
from gristmill_env.settings.environment import EnvironmentSpec
from gristmill_env.settings.rewards import RewardSpec
from gristmill_env.settings.run import EnvConfig, EvalHandling
from gristmill_env.settings.servers import ServerConfig, Url

__all__ = [
    "VERIFIERS",
    "DatasetConfig",
    "EnvConfig",
    "EnvironmentSpec",
    "EvalHandling",
    "RewardSpec",
    "ServerConfig",
    "Url",
]
