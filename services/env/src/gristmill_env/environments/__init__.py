"""Environments: tasks that begin with a row of the data set."""

import gristmill_env.environments.guess  # noqa: F401  importing a module registers its environment
from gristmill_env.environments.acting import EnvironmentGroup, EnvironmentRunner
from gristmill_env.environments.base import DatasetEnvironment, Environment, Reply, Turn
from gristmill_env.environments.registry import EnvironmentFactory, create_environment, environment

__all__ = [
    "DatasetEnvironment",
    "Environment",
    "EnvironmentFactory",
    "EnvironmentGroup",
    "EnvironmentRunner",
    "Reply",
    "Turn",
    "create_environment",
    "environment",
]
