"""Runs rewards: on threads that can be given up, under a deadline, never on the caller's event loop."""

from gristmill_env.rewards.running.calls import Batch, Call, Failure, Outcome, Parted, Said, Task
from gristmill_env.rewards.running.runner import TIMEOUT, Runner

__all__ = ["TIMEOUT", "Batch", "Call", "Failure", "Outcome", "Parted", "Runner", "Said", "Task"]
