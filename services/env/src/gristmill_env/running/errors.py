"""How a job in a process of its own ends without a result."""

from __future__ import annotations

from gristmill_env.errors import RewardError


class JobError(RewardError):
    """A job came to no result. Says nothing of the completion: never a 0."""


class JobOverran(JobError):
    """It took longer than a job may; its process was killed."""


class JobDied(JobError):
    """Its process died under it, of too much memory for example."""


class JobFailed(JobError):
    """It raised."""


class NoProcess(JobError):
    """No process could be started for it."""


class TooManyJobs(JobError):
    """More jobs wait than the pool holds."""
