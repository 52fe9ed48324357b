"""Everything that can be set in a run's YAML or on the command line of the environment.

The key names are those that users of Atropos know. Each field's text is also its `--help`.
"""

from gristmill_env.settings.dataset import VERIFIERS, DatasetConfig, RewardSpec, without_secrets
from gristmill_env.settings.run import (
    TOP_LEVEL,
    AgentSpec,
    EnvConfig,
    EnvironmentSpec,
    EvalHandling,
    ServerConfig,
    TimeoutAction,
    Url,
    differences,
)

__all__ = [
    "TOP_LEVEL",
    "VERIFIERS",
    "AgentSpec",
    "DatasetConfig",
    "EnvConfig",
    "EnvironmentSpec",
    "EvalHandling",
    "RewardSpec",
    "ServerConfig",
    "TimeoutAction",
    "Url",
    "differences",
    "without_secrets",
]
