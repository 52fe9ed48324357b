"""Environments: tasks that begin with a row of the data set."""

import gristmill_env.environments.guess  # noqa: F401  importing a module registers its environment
from gristmill_env.environments.base import DatasetEnvironment, Environment, StepResult
from gristmill_env.environments.model import Model, NoMoreRepliesError, Reply, ToolCall
from gristmill_env.environments.registry import EnvironmentFactory, create_environment, environment
from gristmill_env.environments.runner import EnvironmentRunner

__all__ = [
    "DatasetEnvironment",
    "Environment",
    "EnvironmentFactory",
    "EnvironmentRunner",
    "Model",
    "NoMoreRepliesError",
    "Reply",
    "StepResult",
    "ToolCall",
    "create_environment",
    "environment",
]
